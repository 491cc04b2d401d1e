#!/bin/sh
# Checks the CUDA sources where there is no GPU: runs the kernels on the host, thread by thread,
# against a naive reference, and compiles them and their bindings with nvcc (a CPU torch will do).
#
#   csrc/check_cuda.sh          (PYTHON, CXX and NVCC override the defaults)
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=build/check_cuda
mkdir -p "$out"

echo "== kernels on the host"
"${CXX:-g++}" -std=c++20 -O0 -o "$out/emulate" csrc/cuda/emulate.cpp
"$out/emulate"

nvcc=${NVCC:-nvcc}
if ! command -v "$nvcc" >/dev/null; then
    echo "== nvcc not found: the CUDA sources were not compiled"
    exit 0
fi
echo "== $("$nvcc" --version | sed -n 's/.*release/nvcc release/p')"
torch=$("$python" -c "import os, torch; print(os.path.dirname(torch.__file__))")
headers=$("$python" -c "import sysconfig; print(sysconfig.get_path('include'))")
# One architecture: no source depends on which. Unoptimized, which compiles in half the time.
"$nvcc" -c -O0 -Xcicc -O0 -Xptxas -O0 -std=c++17 --expt-relaxed-constexpr -Xcompiler -fPIC -DUSE_CUDA \
    -DTORCH_TARGET_VERSION=0x020b000000000000 -Icsrc/cuda \
    -I"$torch/include" -I"$torch/include/torch/csrc/api/include" -I"$headers" \
    -gencode=arch=compute_80,code=sm_80 \
    -o "$out/kernels.o" csrc/cuda/kernels.cu
echo "compiled for sm_80"
