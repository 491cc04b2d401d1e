#!/bin/sh
# Checks that the CPU sources compile for aarch64, with a cross compiler (Debian's package
# g++-aarch64-linux-gnu) and the headers of the torch that is installed here.
#
#   csrc/check_aarch64.sh       (PYTHON and CXX override the defaults)
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
cxx=${CXX:-aarch64-linux-gnu-g++}
out=build/aarch64
mkdir -p "$out"

if ! command -v "$cxx" >/dev/null; then
    echo "== $cxx not found: nothing was compiled for aarch64"
    exit 0
fi
torch=$("$python" -c "import os, torch; print(os.path.dirname(torch.__file__))")
headers=$("$python" -c "import sysconfig; print(sysconfig.get_path('include'))")
compile() {
    source=$1
    shift
    "$cxx" -c -O3 -std=c++17 -fPIC -fvisibility=hidden -ffp-contract=fast -Wno-maybe-uninitialized \
        -DPy_LIMITED_API=0x030a0000 "$@" \
        -I"$torch/include" -I"$torch/include/torch/csrc/api/include" -I"$headers" \
        -o "$out/$(basename "$source").o" "$source"
}
for source in csrc/cpu/*.cpp; do
    compile "$source" -DTORCH_TARGET_VERSION=0x020b000000000000
done
compile csrc/allocator/workspace.cpp
echo "compiled for $("$cxx" -dumpmachine)"
