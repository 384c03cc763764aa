#!/usr/bin/env bash
# Expected: a Hub that cannot be reached raises an error of httpx, as in huggingface_hub 1.x, or at least an OSError, as
#           with requests before.
# Happens:  huggingface_hub 2.x uses httpx2, another package. Its ConnectError is neither an error of httpx nor an
#           OSError, and httpx stays installed beside it because other packages need it, so nothing fails at the import.
# Hurts:    programs that catch httpx.HTTPError, ConnectionError or OSError around calls of the Hub: without a network
#           they end in a traceback. huggingface_hub.errors.HTTPError is the right one in both versions.
# Seen:     huggingface_hub 2.4.0, httpx2 2.16.2, httpx 0.28.1, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  "huggingface_hub==2.4.0" "httpx2==2.16.2" "httpx==0.28.1" || exit 75
cd "$folder"
env -u HF_HUB_OFFLINE venv/bin/python - <<'PYTHON'
import socket

import httpx
import huggingface_hub
from huggingface_hub.errors import HTTPError

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    closed = f"http://127.0.0.1:{free.getsockname()[1]}"  # nothing listens there
try:
    huggingface_hub.HfApi(endpoint=closed).model_info("owner/name")
except Exception as error:
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    caught = [isinstance(error, kinds) for kinds in (httpx.HTTPError, OSError, HTTPError)]
print("huggingface_hub", huggingface_hub.__version__, "httpx", httpx.__version__)
print("error:", kind)
print("caught by (httpx.HTTPError, OSError, huggingface_hub.errors.HTTPError):", caught)
assert kind == "httpx2.ConnectError" and caught == [False, False, True]
PYTHON
