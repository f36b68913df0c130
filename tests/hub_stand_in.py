"""A stand-in of the hub's HTTP interface, for uploads by huggingface_hub: repositories in memory, LFS for large files.

It answers what huggingface_hub 1 and 2 ask without Xet: create, model info, file tree, the check of a card's header,
preupload, LFS batch and upload, commit.
"""

import base64
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_standInToken0123456789abcdefghijklmnop"
LARGE = ".safetensors"


@dataclass
class Repo:
    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b""})
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """`on_upload` is called when a large file arrives; what it returns is the status of the answer (None: 200)."""

    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    on_upload: Callable[[], int | None] = lambda: None
    can_write: bool = True
    requests: list[str] = field(default_factory=list)

    def __enter__(self) -> "Hub":
        self._server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone away is no error here: what it left is looked at by the test."""


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self._body())

    def do_PUT(self) -> None:
        data = self._body()
        status = self.hub.on_upload()
        if status == 0:  # the line breaks
            self.close_connection = True
            return
        if status is None:
            self.hub.objects[self.path.rpartition("/")[2]] = data
        self._send({}, status or 200)

    def _answer(self, body: bytes) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send({"error": "Invalid username or password."}, 401)
        for pattern, answer in ROUTES.items():
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                return self._send(*answer(self, body, *found.groups()))
        return self._send({"error": f"no such page: {path}"}, 404)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, data: object, status: int = 200) -> None:
        raw = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *words: object) -> None:
        pass

    # --- the pages ----------------------------------------------------------------------------------------------------

    def create(self, body: bytes) -> tuple[object, int]:
        asked = json.loads(body)
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if not self.hub.can_write:
            return {"error": "You don't have the rights to create a model under this namespace"}, 403
        if name in self.hub.repos:
            return {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409
        self.hub.repos[name] = Repo(bool(asked.get("private")) or asked.get("visibility") == "private")
        return {"url": f"{self.hub.url}/{name}", "name": name, "id": "1"}, 200

    def info(self, body: bytes, name: str) -> tuple[object, int]:
        if name not in self.hub.repos:
            return {"error": "Repository not found"}, 404
        repo = self.hub.repos[name]
        siblings = [{"rfilename": file} for file in repo.files]
        return {"id": name, "modelId": name, "sha": "0" * 40, "private": repo.private, "siblings": siblings}, 200

    def tree(self, body: bytes, name: str) -> tuple[object, int]:
        files = self.hub.repos[name].files
        return [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in files.items()], 200

    def validate(self, body: bytes) -> tuple[object, int]:
        assert json.loads(body)["content"].startswith("---\n")
        return {"warnings": [], "errors": []}, 200

    def preupload(self, body: bytes, name: str) -> tuple[object, int]:
        files = json.loads(body)["files"]
        modes = [(file["path"], "lfs" if file["path"].endswith(LARGE) else "regular") for file in files]
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes]}, 200

    def batch(self, body: bytes, name: str) -> tuple[object, int]:
        objects = json.loads(body)["objects"]
        for one in objects:
            one["actions"] = {"upload": {"href": f"{self.hub.url}/objects/{one['oid']}"}}
        return {"objects": objects, "transfer": "basic"}, 200

    def commit(self, body: bytes, name: str) -> tuple[object, int]:
        repo = self.hub.repos[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repo.commits.append(value["summary"])
            elif line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                del repo.files[value["path"]]
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}, 200


ROUTES = {
    "POST /api/repos/create": Handler.create,
    "GET /api/models/([^/]+/[^/]+)": Handler.info,
    "GET /api/models/([^/]+/[^/]+)/revision/main": Handler.info,
    "GET /api/models/([^/]+/[^/]+)/tree/main": Handler.tree,
    "POST /api/validate-yaml": Handler.validate,
    "POST /api/models/([^/]+/[^/]+)/preupload/main": Handler.preupload,
    "POST /([^/]+/[^/]+).git/info/lfs/objects/batch": Handler.batch,
    "POST /api/models/([^/]+/[^/]+)/commit/main": Handler.commit,
}
