#!/usr/bin/env bash
# Installs the frameworks that `rftdask conformance` compares with into a virtual environment: install_peers.sh VENV
#
# TRL comes with the extra "conformance", which resolves with constraints.txt. The others name versions of transformers that
# exclude each other and ours, and packages that are compiled for a GPU; their loss functions need none of it. So they are
# installed without their dependencies; what their imports need is in the extra. Done once, it is left alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${1:?usage: install_peers.sh VENV}/bin/python
peers=(verl==0.9.1 openrlhf==0.11.2 trinity-rft==0.6.0)

if "$python" - trl "${peers[@]}" <<'PYTHON'; then
import sys
from importlib.metadata import PackageNotFoundError, version

def is_there(wanted):
    name, _, pin = wanted.partition("==")
    try:
        return version(name) == (pin or version(name))
    except PackageNotFoundError:
        return False

sys.exit(not all(map(is_there, sys.argv[1:])))
PYTHON
  exit 0
fi
pip=("$python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" -c constraints.txt -e ".[conformance]"
"${pip[@]}" --no-deps "${peers[@]}"
