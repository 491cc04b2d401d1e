"""mamba_ssm's own modules on a CPU, forward and backward, by its own reference functions.

The package is written for CUDA: it imports a compiled extension and Triton, and its modules call
their kernels. Under :func:`on_cpu` the extension and (where it is missing) Triton are empty
stand-ins, and every kernel is replaced: the scan by the package's own reference function, the fused
norm by its equations, so that its autograd function is run as it is.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace

import torch


@contextmanager
def on_cpu() -> Iterator[SimpleNamespace]:
    """``Mamba``, ``Mamba3``, ``MambaLMHeadModel``, ``MambaConfig`` of mamba_ssm, run on a CPU.

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
    mamba3_scan = load("ops.triton.mamba3.mamba3_siso_combined")
    simple = load("modules.mamba_simple")
    mamba3 = load("modules.mamba3")
    mixer_seq = load("models.mixer_seq_simple")

    references = {
        scan.selective_scan_fn: scan.selective_scan_ref,
        norm._layer_norm_fwd: _norm_forward,
        norm._layer_norm_bwd: _norm_backward,
        gated_norm.rmsnorm_fn: gated_norm.rms_norm_ref,
        mamba3_scan.mamba3_siso_combined: mamba3_siso,
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "mamba_ssm":
            for key, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in references:
                    setattr(module, key, references[value])
    simple.causal_conv1d_fn = None  # its own nn.Conv1d then
    return SimpleNamespace(
        Mamba=simple.Mamba,
        Mamba3=mamba3.Mamba3,
        MambaLMHeadModel=mixer_seq.MambaLMHeadModel,
        MambaConfig=load("models.config_mamba").MambaConfig,
    )


def mamba3_siso(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D=None, Z=None, chunk_size=64, **_):
    """What the kernel of Mamba-3 computes, token by token, by the paper's recurrence.

    ``h_t = a_t h_(t-1) + a_t (1 - s_t) dt_t k_(t-1) v_(t-1) + s_t dt_t k_t v_t``
    """
    B, L, H, P = V.shape
    repeat, share = H // Q.shape[2], torch.sigmoid(Trap)
    Q, K = (t.repeat_interleave(repeat, 2) for t in (Q, K))
    angle = Q.new_zeros(B, H, Q.shape[-1] // 2)
    state, before = Q.new_zeros(B, H, Q.shape[-1], P), Q.new_zeros(B, H, Q.shape[-1], P)
    out = []
    for t in range(L):
        dt, a, s = (x[:, :, t, None, None] for x in (DT, ADT.exp(), share))
        turn = torch.tanh(Angles[:, t]) * torch.pi * dt[..., 0]
        angle = angle + torch.nn.functional.pad(turn, (0, angle.shape[-1] - turn.shape[-1]))
        q, k = (
            torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
                               * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
            for x in (Q[:, t] + Q_bias, K[:, t] + K_bias)
        )  # fmt: skip
        now = k[..., None] * V[:, t, :, None]
        state = a * (state + (1 - s) * dt * before) + s * dt * now
        before = now
        out.append((q[..., None] * state).sum(-2))
    y = torch.stack(out, 1)
    y = y if D is None else y + D[:, None] * V
    return y if Z is None else y * torch.nn.functional.silu(Z)


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
