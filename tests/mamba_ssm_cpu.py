"""mamba_ssm's own modules on a CPU, forward and backward, by its own reference functions.

The package is written for CUDA: it imports a compiled extension and Triton, and its modules call
their kernels. Under :func:`on_cpu` the extension and (where it is missing) Triton are empty
stand-ins, and every kernel is replaced by the reference function that the package has for it.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace


@contextmanager
def on_cpu() -> Iterator[SimpleNamespace]:
    """``Mamba``, ``MambaLMHeadModel`` and ``MambaConfig`` of mamba_ssm, runnable on a CPU.

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
    simple = load("modules.mamba_simple")
    mixer_seq = load("models.mixer_seq_simple")

    def norm_fn(x, weight, bias, residual=None, eps=1e-6, prenorm=False, is_rms_norm=False, **_):
        reference = norm.rms_norm_ref if is_rms_norm else norm.layer_norm_ref
        return reference(x, weight, bias, residual, eps=eps, prenorm=prenorm)

    def rms_norm_fn(*args, **kwargs):
        return norm_fn(*args, **kwargs, is_rms_norm=True)

    references = {
        scan.selective_scan_fn: scan.selective_scan_ref,
        norm.layer_norm_fn: norm_fn,
        norm.rms_norm_fn: rms_norm_fn,
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "mamba_ssm":
            for key, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in references:
                    setattr(module, key, references[value])
    simple.causal_conv1d_fn = None  # its own nn.Conv1d then
    return SimpleNamespace(
        Mamba=simple.Mamba,
        MambaLMHeadModel=mixer_seq.MambaLMHeadModel,
        MambaConfig=load("models.config_mamba").MambaConfig,
    )


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
