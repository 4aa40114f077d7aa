"""A stand-in for the Hugging Face hub on this machine: the few requests that its client makes."""

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories by name: folders to read, and the files that were committed."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.committed: dict[str, dict[str, bytes]] = {}
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, range
        self.sent: dict[str, int] = {}  # file -> bytes of its content that went out
        self.refuse: dict[str, int] = {}  # part of a path -> status
        self.endpoint = ""

    def answer(self, method: str, path: str) -> tuple[int, object]:
        """Status and JSON, or a file."""
        for part, status in self.refuse.items():
            if part in path:
                return status, {"error": "refused"}
        if path.startswith("/api/models/"):
            owner, name, what, *_ = [*path.removeprefix("/api/models/").split("/"), ""]
            folder = self.folders.get(f"{owner}/{name}")
            if folder is None:
                return 404, {"error": "Repository not found"}
            files = sorted(p for p in folder.iterdir() if p.is_file())
            if what == "tree":
                entry = lambda p: {"size": p.stat().st_size, "path": p.name}  # noqa: E731
                return 200, [{"type": "file", "oid": _oid(p)} | entry(p) for p in files]
            siblings = [{"rfilename": p.name} for p in files]
            return 200, {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings}
        owner, name, *rest = path.strip("/").split("/")
        file = self.folders.get(f"{owner}/{name}", Path("/nowhere")) / rest[-1]
        return (200, file) if file.is_file() else (404, {"error": "Entry not found"})

    def post(self, path: str, body: bytes) -> object:
        """JSON for what is written to the hub."""
        if path == "/api/repos/create":
            request = json.loads(body)
            repo = f"{request.get('organization') or 'someone'}/{request['name']}"
            self.committed[repo] = {}
            return {"url": f"{self.endpoint}/{repo}", "name": repo, "id": "1"}
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---")
            return {"errors": [], "warnings": []}
        owner, name, what, *_ = path.removeprefix("/api/models/").split("/")
        if what == "preupload":
            files = [f["path"] for f in json.loads(body)["files"]]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": f} | mode for f in files]}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.committed[f"{owner}/{name}"][line["value"]["path"]] = content
        url = f"{self.endpoint}/{owner}/{name}/commit/{COMMIT}"
        return {"success": True, "commitUrl": url, "commitOid": COMMIT, "hookOutput": ""}


def _oid(path: Path) -> str:
    return f"{abs(hash((path.name, path.stat().st_size))):040x}"[:40]


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers on a port of this machine."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._send(body=False)

        def do_GET(self) -> None:
            self._send(body=True)

        def do_POST(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(("POST", path, None))
            body = self._body()
            refused = next((s for part, s in hub.refuse.items() if part in path), None)
            answer = {"error": "refused"} if refused else hub.post(path, body)
            self._json(refused or 200, answer)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def _send(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range")))
            status, answer = hub.answer(self.command, path)
            if not isinstance(answer, Path):
                return self._json(status, answer, body)
            data, size = answer.read_bytes(), answer.stat().st_size
            first, last = 0, size - 1
            if wanted := self.headers.get("Range"):
                low, _, high = wanted.removeprefix("bytes=").partition("-")
                first, last = int(low), min(int(high or last), last)
            part = data[first : last + 1]
            self.send_response(206 if wanted else 200)
            self.send_header("ETag", f'"{_oid(answer)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            if wanted:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if body:
                hub.sent[answer.name] = hub.sent.get(answer.name, 0) + len(part)
                self.wfile.write(part)

        def _json(self, status: int, answer: object, body: bool = True) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            if status == 403:
                self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Nothing on standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
