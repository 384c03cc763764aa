#!/usr/bin/env bash
# Expected: a streamed answer that stops halfway raises an error, as a cut connection does.
# Happens:  if the response ends properly as HTTP but without a finish reason and without the closing [DONE], the loop
#           over the stream ends as after a complete answer. The helper stream() also returns a final completion, whose
#           finish_reason is None.
# Hurts:    programs behind a gateway or a server that ends its response when its model fails: half an answer is scored
#           and stored as a whole one. A check of finish_reason finds it.
# Seen:     openai 2.54.0, November 2026; 3.57.0 does the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "openai==2.54.0" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import http.server
import json
import threading

import openai


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for delta in ({"role": "assistant", "content": "The answer"}, {"content": " is"}):
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            event = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            data = f"data: {json.dumps(event)}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")  # the proper end of the response, after half of the answer

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", max_retries=0)
request = {"model": "m", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**request, stream=True)]
with client.chat.completions.stream(**request) as stream:
    final = stream.get_final_completion().choices[0]
print("openai", openai.__version__)
print("create:", [(chunk.delta.content, chunk.finish_reason) for chunk in chunks])
print("stream:", (final.message.content, final.finish_reason))
assert [(chunk.delta.content, chunk.finish_reason) for chunk in chunks] == [("The answer", None), (" is", None)]
assert (final.message.content, final.finish_reason) == ("The answer is", None)
server.shutdown()
PYTHON
