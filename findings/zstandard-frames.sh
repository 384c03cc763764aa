#!/usr/bin/env bash
# Expected: decompress returns all of the data, as the one of gzip, bz2 and lzma does, or raises.
# Happens:  zstd data may consist of several frames, one after the other; a file that was written in parts is one.
#           ZstdDecompressor.decompress returns the first frame and drops the others without an error. decompressobj
#           does the same. open and stream_reader of the same package return all of them.
# Hurts:    logs that are appended to, and datasets whose parts were joined by cat: all rows after the first part are
#           missing.
# Seen:     zstandard 0.25.0, November 2026; allow_extra_data=False raises an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "zstandard==0.25.0" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import gzip
import io

import zstandard

parts = [b"first part\n", b"second part\n"]
data = b"".join(zstandard.compress(part) for part in parts)
seen = {
    "decompress": zstandard.ZstdDecompressor().decompress(data),
    "decompressobj": zstandard.ZstdDecompressor().decompressobj().decompress(data),
    "stream_reader": zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read(),
    "open": zstandard.open(io.BytesIO(data)).read(),
    "gzip": gzip.decompress(b"".join(gzip.compress(part) for part in parts)),
}
print("zstandard", zstandard.__version__)
for name, text in seen.items():
    print(f"{name}: {text}")
assert seen["decompress"] == seen["decompressobj"] == parts[0]
assert seen["stream_reader"] == seen["open"] == seen["gzip"] == b"".join(parts)
try:
    zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
except zstandard.ZstdError as error:
    print("allow_extra_data=False:", error)
else:
    raise AssertionError("allow_extra_data=False raises no error")
PYTHON
