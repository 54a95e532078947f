#!/usr/bin/env bash
# Compares weact with PyTorch, transformers and PEFT on the CPU: the same files, the same steps, in turn. Prints a Markdown table.
# usage: benches/versus/run.sh merge [--layers 28] [--out FILE.json], for TIES against PEFT's
#        benches/versus/run.sh [--rounds 15] [--jobs lora-1x256,small:full-8x256,..] [--model models/smollm2] [--out FILE.json]
#
# Needs Linux, rust, cargo, and python3 with venv and pip. The Python packages go into target/versus/venv, or into the virtual
# environment that WEACT_VERSUS_VENV names. Nothing else should run meanwhile.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${WEACT_VERSUS_VENV:-$here/../../target/versus/venv}
python=$venv/bin/python

has_packages() {
    "$python" - "$here/requirements.txt" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

def installed(name):
    try:
        return version(name).split("+")[0]
    except PackageNotFoundError:
        return None

pins = [line.strip().split("==") for line in open(sys.argv[1]) if "==" in line]
sys.exit(any(installed(name) != pinned for name, pinned in pins))
PYTHON
}

[ -x "$python" ] || python3 -m venv "$venv"
if ! has_packages; then
    echo "installing $here/requirements.txt into $venv" >&2
    "$python" -m pip install --quiet -r "$here/requirements.txt"
fi
if [ "${1:-}" = merge ]; then
    shift
    exec "$python" "$here/merge.py" "$@"
fi
exec "$python" "$here/compare.py" "$@"
