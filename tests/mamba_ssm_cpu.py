"""mamba_ssm's own modules on a CPU, forward and backward, by its own reference functions.

The package is written for CUDA: it imports a compiled extension and Triton, and its modules call
their kernels. Under :func:`on_cpu` the extension and (where it is missing) Triton are empty
stand-ins, and every kernel is replaced: the scan by the package's own reference function, the fused
norm by its equations, so that its autograd function is run as it is.
"""

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace

import torch


@contextmanager
def on_cpu() -> Iterator[SimpleNamespace]:
    """mamba_ssm's mixers, ``MambaLMHeadModel`` and ``MambaConfig``, run on a CPU.

    At the end the package is forgotten: transformers binds mamba_ssm's functions into a modeling
    file that is imported while the package can be, and other tests would then run those.
    """
    for name in ("mamba", "falcon_mamba", "jamba", "zamba"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    stand_ins = {"selective_scan_cuda": ModuleType("selective_scan_cuda")}
    if importlib.util.find_spec("triton") is None:
        stand_ins |= _triton()
    sys.modules.update(stand_ins)
    try:
        try:
            modules = _import()
        finally:
            for name in stand_ins:
                sys.modules.pop(name, None)
        yield modules
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "mamba_ssm"]:
            del sys.modules[name]


def _import() -> SimpleNamespace:
    def load(name: str) -> ModuleType:
        return importlib.import_module(f"mamba_ssm.{name}")

    scan = load("ops.selective_scan_interface")
    norm = load("ops.triton.layer_norm")
    gated_norm = load("ops.triton.layernorm_gated")
    ssd = load("ops.triton.ssd_combined")
    mamba3_scan = load("ops.triton.mamba3.mamba3_siso_combined")
    simple = load("modules.mamba_simple")
    mamba3 = load("modules.mamba3")
    mixer_seq = load("models.mixer_seq_simple")

    references = {
        scan.selective_scan_fn: scan.selective_scan_ref,
        norm._layer_norm_fwd: _norm_forward,
        norm._layer_norm_bwd: _norm_backward,
        gated_norm.rmsnorm_fn: gated_norm.rms_norm_ref,
        ssd.mamba_chunk_scan_combined: _taking(ssd.ssd_selective_scan),
        ssd.mamba_split_conv1d_scan_combined: _taking(ssd.mamba_split_conv1d_scan_ref),
        mamba3_scan.mamba3_siso_combined: mamba3_siso,
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "mamba_ssm":
            for key, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in references:
                    setattr(module, key, references[value])
    simple.causal_conv1d_fn = None  # its own nn.Conv1d then
    ssd.causal_conv1d_fn = _convolution  # which the reference of the fused path calls
    mamba3.mamba3_mimo_combined = mamba3_mimo  # which needs TileLang
    return SimpleNamespace(
        Mamba=simple.Mamba,
        Mamba2=load("modules.mamba2").Mamba2,
        Mamba2Simple=load("modules.mamba2_simple").Mamba2Simple,
        Mamba3=mamba3.Mamba3,
        MambaLMHeadModel=mixer_seq.MambaLMHeadModel,
        MambaConfig=load("models.config_mamba").MambaConfig,
    )


def _taking(reference):
    # A reference function, given also what only its kernel takes.
    taken = inspect.signature(reference).parameters

    def call(*args, **kwargs):
        named = dict(zip(names, args, strict=False)) | kwargs
        assert all(named.get(name) is None for name in ("initial_states", "seq_idx", "cu_seqlens"))
        return reference(**{name: value for name, value in named.items() if name in taken})

    names = [*taken]
    if "chunk_size" not in taken:
        names.insert(names.index("C") + 1, "chunk_size")
    return call


def _convolution(x, weight, bias, activation=None):
    y = torch.nn.functional.conv1d(
        torch.nn.functional.pad(x, (weight.shape[1] - 1, 0)),
        weight[:, None],
        bias,
        groups=len(weight),
    )
    return torch.nn.functional.silu(y) if activation else y


def mamba3_siso(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D=None, Z=None, **_):
    """What the kernel of Mamba-3 computes, by the paper's recurrence, token by token."""
    Q, K = (_rotated(x, bias, Angles, DT, -1) for x, bias in ((Q, Q_bias), (K, K_bias)))
    y = _trapezoid(Q, K, V, ADT, DT, Trap)
    y = y if D is None else y + D[:, None] * V
    return y if Z is None else y * torch.nn.functional.silu(Z)


def mamba3_mimo(
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, MIMO_V, MIMO_Z, MIMO_Out, Angles, D=None, Z=None, **_
):
    """The result of the kernel for several inputs and outputs per head, of which there are R."""
    ranks = range(Q.shape[2])
    Q, K = (
        [_rotated(x[:, :, r], bias[:, r], Angles, DT, -2) for r in ranks]
        for x, bias in ((Q, Q_bias), (K, K_bias))
    )
    outs = []
    for r in ranks:
        y = sum(_trapezoid(Q[r], K[s], V * MIMO_V[:, s], ADT, DT, Trap) for s in ranks)
        y = y if D is None else y + D[:, None] * V * MIMO_V[:, r]
        outs.append(y if Z is None else y * torch.nn.functional.silu(Z * MIMO_Z[:, r]))
    if MIMO_Out is None:
        return torch.stack(outs, 2)
    return sum(y * MIMO_Out[:, r] for r, y in enumerate(outs))


def _trapezoid(q, k, v, ADT, DT, Trap):
    # h_t = a_t h_(t-1) + a_t (1 - s_t) dt_t k_(t-1) v_(t-1) + s_t dt_t k_t v_t
    share = torch.sigmoid(Trap)
    state, before = 0.0, 0.0
    out = []
    for t in range(v.shape[1]):
        dt, a, s = (x[:, :, t, None, None] for x in (DT, ADT.exp(), share))
        now = k[:, t, :, :, None] * v[:, t, :, None]
        state = a * (state + (1 - s) * dt * before) + s * dt * now
        before = now
        out.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, 1)


def _rotated(x, bias, angles, DT, axis):
    # Pairs of neighbors (axis -1) or of the two halves (-2), turned by the sum of the angles.
    x = x.repeat_interleave(DT.shape[1] // x.shape[2], 2) + bias
    turn = (torch.tanh(angles) * torch.pi * DT.transpose(1, 2)[..., None]).cumsum(1)
    turn = torch.nn.functional.pad(turn, (0, x.shape[-1] // 2 - turn.shape[-1]))
    pairs = x.unflatten(-1, (-1, 2) if axis == -1 else (2, -1)).movedim(axis, -1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(turn), turn)
    return torch.view_as_real(turned).movedim(-1, axis).flatten(-2)


def _norm_forward(x, weight, bias, eps, residual=None, *_, is_rms_norm=False, **__):
    # What the kernel behind mamba_ssm's LayerNormFn returns, for a residual of x's dtype.
    added = x if residual is None else x + residual
    mean = None if is_rms_norm else added.mean(-1)
    centred = added if mean is None else added - mean[:, None]
    rstd = (centred.square().mean(-1) + eps).rsqrt()
    y = centred * rstd[:, None] * weight
    return y if bias is None else y + bias, None, mean, rstd, added, None, None, None


def _norm_backward(dy, x, weight, bias, eps, mean, rstd, dresidual, *others, **_):
    *_, has_residual, has_x1, is_rms_norm = others
    assert not has_x1
    assert is_rms_norm == (mean is None)
    centred = x if mean is None else x - mean[:, None]
    normed, pulled = centred * rstd[:, None], dy * weight
    dx = pulled - normed * (pulled * normed).mean(-1, keepdim=True)
    dx = (dx if mean is None else dx - pulled.mean(-1, keepdim=True)) * rstd[:, None]
    dx = dx if dresidual is None else dx + dresidual
    db = None if bias is None else dy.sum(0)
    return dx, (dy * normed).sum(0), db, dx if has_residual else None, None, None, None


def _triton() -> dict[str, ModuleType]:
    # Enough for the files of kernels to be imported, never to be run.
    names = ("triton", "triton.language", "triton.testing")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == "triton")
    triton, language = modules["triton"], modules["triton.language"]

    class Config:
        def __init__(self, kwargs, **options):
            self.kwargs = kwargs
            self.__dict__.update(options)

    def decorator(function=None, configs=None, **_):
        # jit, heuristics(...) and autotune(configs=...) keep the function.
        def keep(f):
            if configs is not None:
                f.configs = configs
            return f

        return keep(function) if callable(function) else keep

    language.__getattr__ = lambda name: object
    triton.__version__, triton.__path__, triton.Config = "3.0.0", [], Config
    triton.jit = triton.autotune = triton.heuristics = triton.set_allocator = decorator
    triton.language, triton.testing = language, modules["triton.testing"]
    return modules
