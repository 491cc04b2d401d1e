#!/usr/bin/env bash
# Tests of flash-linear-attention's layers, on a CPU and in an environment of their own: where fla
# can be imported, transformers' Qwen3-Next and its relatives call its kernels, which need a GPU.
#
#   bash tests/fla/run.sh [pytest arguments, files relative to tests/fla]
#
# PYTHON is the interpreter of an environment that holds this package's requirements, whose
# packages are shared; FLA_VENV is where the environment is made.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
venv="${FLA_VENV:-$root/.venv-fla}"

if [ ! -f "$venv/.installed.stamp" ]; then
    # Without pip and without bytecode of what is not imported: most of the time it took.
    "$python" -m venv --without-pip "$venv"
    "$python" -m pip --python "$venv/bin/python" install --quiet --no-deps --no-compile \
        "triton==3.9.0" "fla-core==0.6.0" "flash-linear-attention==0.6.0"
    touch "$venv/.installed.stamp"
fi
# Anew each time: the environment may have been made for another interpreter's packages.
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/shared.pth"

cd "$here"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$venv/bin/python" -m pytest "$@"
