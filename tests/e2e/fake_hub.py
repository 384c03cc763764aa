"""A Hugging Face Hub in this process: it creates models, accepts commits with inline files, and keeps all uploads."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub:
    """Uploads: `models` by name, `private` for models created as private, `commits` for their messages."""

    def __init__(self) -> None:
        self.url = ""
        self.models: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[str] = []
        self.token = "hf_" + "x" * 20

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, object]:
        if token != f"Bearer {self.token}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        words = path.partition("?")[0].strip("/").split("/")
        if words == ["api", "validate-yaml"]:  # the head of a card
            return 200, {"errors": [], "warnings": []}
        if words == ["api", "repos", "create"]:
            request = json.loads(body)
            name = f"{request['organization']}/{request['name']}" if request.get("organization") else request["name"]
            is_new = name not in self.models
            self.models.setdefault(name, {})
            if is_new:
                self.private[name] = request.get("visibility") == "private" or bool(request.get("private"))
            return (200 if is_new else 409), {"url": f"{self.url}/{name}", "name": name}
        if words[:2] == ["api", "models"] and (name := "/".join(words[2:4])) in self.models:
            if words[4:5] == ["preupload"]:
                # All files arrive inline in the commit, like small files; large files would go to an object store
                # first.
                files = [{**file, "uploadMode": "regular"} for file in json.loads(body)["files"]]
                return 200, {"files": [{**file, "shouldIgnore": False, "oid": None} for file in files]}
            if words[4:5] == ["commit"]:
                for item in map(json.loads, body.splitlines()):
                    if item["key"] == "header":
                        self.commits.append(item["value"]["summary"])
                    elif item["key"] == "file":
                        self.models[name][item["value"]["path"]] = base64.b64decode(item["value"]["content"])
                oid = f"{len(self.commits):040x}"
                return 200, {"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid, "success": True}
            return 200, {"id": name, "modelId": name, "sha": "0" * 40, "siblings": [], "private": self.private[name]}
        return 404, {"error": f"{method} {path} is not here"}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, answer = hub.answer(self.command, self.path, body, self.headers.get("Authorization", ""))
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_POST = do_HEAD = do_PUT = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
