#!/usr/bin/env bash
# Expected: find returns files, and what it returns can be read; ls, isfile and info agree with it.
# Happens:  consoles and other tools mark a "folder" of a bucket by an empty object whose key ends in a slash. s3fs lists
#           it among the files of find (and of glob with **), while ls leaves it out, isfile says no and info says
#           directory; reading what find returned without the slash raises FileNotFoundError.
# Hurts:    "for each file below this prefix": logs, shards and checkpoints of a run whose bucket somebody opened in a
#           browser.
# Seen:     s3fs 2026.9.0 against the server of moto 5.2.5, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "s3fs==2026.9.0" "moto[server]==5.2.5" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import logging
import os

import s3fs
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_DEFAULT_REGION="us-east-1")
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
try:
    store = s3fs.S3FileSystem(endpoint_url=f"http://{host}:{port}")
    store.mkdir("bucket")
    store.pipe_file("bucket/logs/", b"")
    store.pipe_file("bucket/logs/a.log", b"text")
    store.invalidate_cache()
    found, listed = store.find("bucket/logs"), store.ls("bucket/logs", detail=False)
    kind = store.info("bucket/logs/")["type"]
    print("s3fs", s3fs.__version__)
    print("find:", found)
    print("ls:  ", listed)
    print("info:", kind, "isfile:", store.isfile("bucket/logs/"))
finally:
    server.stop()
assert found == ["bucket/logs/", "bucket/logs/a.log"]
assert listed == ["bucket/logs/a.log"]
assert kind == "directory" and not store.isfile("bucket/logs/")
PYTHON
