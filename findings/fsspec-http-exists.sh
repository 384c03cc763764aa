#!/usr/bin/env bash
# Expected: exists returns False for a file that does not exist. If the server is overloaded or denies access, it
#           raises, as reading the file does.
# Happens:  over HTTP exists and isfile return False for each of the answers 401, 429 and 503, and info raises
#           FileNotFoundError. Only cat_file and isdir raise the error of the server.
# Hurts:    programs that ask "is there a checkpoint?" before they start anew, and programs that create a file if it
#           does not exist: one busy moment of the server looks like an empty folder.
# Seen:     fsspec 2026.9.0 with aiohttp 3.14.5, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  "fsspec==2026.9.0" "aiohttp==3.14.5" "requests" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import http.server
import threading

import fsspec


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(int(self.path.strip("/")))

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
files = fsspec.filesystem("http")
print("fsspec", fsspec.__version__)
for status in (404, 401, 429, 503):
    seen = {}
    for call in ("exists", "isfile", "info", "cat_file"):
        try:
            seen[call] = getattr(files, call)(f"http://127.0.0.1:{server.server_port}/{status}")
        except Exception as error:
            seen[call] = type(error).__name__
    print(status, seen)
    assert seen["exists"] is False and seen["isfile"] is False and seen["info"] == "FileNotFoundError"
    assert seen["cat_file"] == ("FileNotFoundError" if status == 404 else "ClientResponseError")
server.shutdown()
PYTHON
