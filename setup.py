"""Build of the compiled kernels; all metadata is in setup.cfg.

The kernels use libtorch's stable ABI and Python's limited API, so one build serves every torch
from 2.11 and every Python from 3.10; the allocator serves the torch it was built with. Where
those for CUDA cannot be built (no nvcc, or one of another CUDA than torch's), those for the CPU are
built alone. Where none can be built (no torch in the build environment, no compiler), the package
installs as pure Python. The build says so.
"""

import os
import site
import sys
from pathlib import Path

from setuptools import setup

TORCH_ABI = "0x020b000000000000"  # the oldest torch served, 2.11
HERE = Path(__file__).parent
CUDA = "captum_ssm._C_cuda"


def say(text):
    print(f"\ncaptum_ssm: {text}\n", file=sys.stderr)


def without_kernels(why):
    say(
        f"building WITHOUT compiled kernels: {why}\n"
        "captum_ssm: the PyTorch forms will be used, which are several times slower. The kernels "
        "need torch >= 2.11, installed first, and a C++17 compiler."
    )


def architectures():
    """The option of nvcc that says for which GPUs to compile; none where torch chooses them."""
    import torch

    # Torch takes those that it sees, and fails where it sees none, as on the machines that build
    # containers.
    is_chosen = os.environ.get("TORCH_CUDA_ARCH_LIST") or torch.cuda.device_count()
    return [] if is_chosen else ["-arch=all-major"]


def sources(folder, suffix):
    # setuptools wants paths relative to setup.py.
    return sorted(str(p.relative_to(HERE)) for p in (HERE / "csrc" / folder).glob(f"*{suffix}"))


def extension():
    """The arguments of setup() that build the kernels; none of them where that is impossible."""
    if os.environ.get("CAPTUM_SSM_BUILD", "1") == "0":
        without_kernels("CAPTUM_SSM_BUILD=0")
        return {}
    # pip builds in an environment of its own, without torch. The one that it installs into has it.
    sys.path += site.getsitepackages()
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        without_kernels(f"torch cannot be imported ({error})")
        return {}

    own = os.environ.get("CAPTUM_SSM_CXXFLAGS", "").split()
    ldflags = os.environ.get("CAPTUM_SSM_LDFLAGS", "").split()
    plain = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden"]
    cxx = [
        *plain,
        "-ffp-contract=fast",
        "-Wno-maybe-uninitialized",
        f"-DTORCH_TARGET_VERSION={TORCH_ABI}",
    ]
    # What the sources include, so that a change of it builds them anew.
    headers = [
        str(p.relative_to(HERE))
        for pattern in ("*.h", "*.inc", "*.cuh")
        for p in sorted((HERE / "csrc").rglob(pattern))
    ]
    modules = [
        cpp_extension.CppExtension(
            "captum_ssm._C",
            sources("cpu", ".cpp"),
            depends=headers,
            extra_compile_args={"cxx": cxx + own},
            extra_link_args=ldflags,
            py_limited_api=True,
        )
    ]
    if sys.platform == "linux":  # elsewhere, malloc itself keeps what is freed
        modules.append(
            cpp_extension.CppExtension(
                "captum_ssm._C_allocator",
                sources("allocator", ".cpp"),
                extra_compile_args={"cxx": plain + own},
                extra_link_args=ldflags,
                py_limited_api=True,
            )
        )
    import torch

    cuda = sources("cuda", ".cu")
    if cuda and torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None:
        common = ["-O3", "-std=c++17", f"-DTORCH_TARGET_VERSION={TORCH_ABI}", "-DUSE_CUDA"]
        modules.append(
            cpp_extension.CUDAExtension(
                CUDA,
                cuda,
                depends=headers,
                extra_compile_args={
                    "cxx": [*common, "-fvisibility=hidden"],
                    "nvcc": [*common, *architectures()],
                },
                py_limited_api=True,
            )
        )

    class Build(cpp_extension.BuildExtension):
        def run(self):
            before = dict(vars(self))
            try:
                super().run()
            except Exception as error:
                vars(self).update(before)  # what a build sets up is no way to begin another
                others = [module for module in self.extensions if module.name != CUDA]
                if len(others) < len(self.extensions):
                    say(
                        f"building WITHOUT CUDA kernels: the build failed ({error})\n"
                        "captum_ssm: on a GPU the PyTorch forms will be used. The CUDA kernels "
                        "need an nvcc of the CUDA that torch was built with."
                    )
                    self.extensions = others
                    self.run()
                else:
                    self.extensions = []  # so that nothing looks for files that were not built
                    without_kernels(f"the build failed ({error})")

    return {"ext_modules": modules, "cmdclass": {"build_ext": Build}}


setup(**extension())
