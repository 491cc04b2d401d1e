#!/bin/sh
# Builds the CPU extension with AddressSanitizer and UndefinedBehaviorSanitizer, separate from
# the installed one, and runs the tests of the kernels and of the allocator under them with every
# instruction set.
#
#   csrc/sanitize.sh            (PYTHON=... and CXX=... override the defaults)
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
cxx=${CXX:-g++}
out=build/sanitize
flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined"

rm -rf "$out"
mkdir -p "$out/lib"
cp -r captum_ssm "$out/lib/"
find "$out/lib" -name '*.so' -delete
CAPTUM_SSM_CXXFLAGS="$flags -g -O1 -fno-omit-frame-pointer" CAPTUM_SSM_LDFLAGS="$flags" \
    "$python" setup.py -q build_ext --build-lib "$out/lib" --build-temp "$out/temp" >"$out/log" 2>&1
test -e "$out"/lib/captum_ssm/_C.abi3.so || { cat "$out/log"; exit 1; }

# Python itself is not instrumented: the runtimes come first, and leaks of its own are not ours.
# Subprocesses (compilers) are excluded; each instruction set has its own run. Python
# looks in the working directory first, so that must be the instrumented package's.
root=$PWD
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
selection="not compiles and not avx2 and not portable and not forced_torch and not missing"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
export LD_PRELOAD="$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libstdc++.so)"
cd "$out/lib"
for isa in avx512 avx2 portable; do
    export CAPTUM_SSM_ISA=$isa
    "$python" -c "
import os, captum_ssm.kernels, captum_ssm._C as C
assert os.path.samefile(os.path.dirname(C.__file__), 'captum_ssm'), C.__file__
print('== $isa:', C.__file__)"
    "$python" -m pytest -p no:cacheprovider -c "$root/setup.cfg" --rootdir "$root" \
        "$root"/tests/kernels/test_kernels.py "$root"/tests/kernels/test_kernels_backward.py \
        "$root"/tests/utils/test_allocator.py -k "$selection" "$@"
done
