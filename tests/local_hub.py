"""A Hugging Face Hub on this machine, with the few endpoints that a download needs."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves folders as models at one commit, which is also the branch main and the tag v1."""

    daemon_threads = True

    def __init__(self, models: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.gated = gated
        self.requests: list[str] = []  # METHOD path
        self.hangs = False  # accepts connections and never answers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        if self.server.hangs:
            threading.Event().wait(60)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._describe(*match.groups())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            name, _, file = match.groups()
            if name in self.server.gated:
                return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            content = (self.server.models[name] / file).read_bytes()
            self._send(200, content, {"ETag": f'"{sha1(content).hexdigest()}"'})
        else:
            self._send(404)
        return None

    def _describe(self, name: str, what: str | None, revision: str | None) -> None:
        if name not in self.server.models:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in (None, "main", "v1", COMMIT):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        folder = self.server.models[name]
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in files]
        if what == "tree":
            answer: object = [
                {
                    "type": "file",
                    "path": file,
                    "size": path.stat().st_size,
                    "oid": sha1(path.read_bytes()).hexdigest(),
                }
                for file, path in zip(names, files, strict=True)
            ]
        else:
            answer = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
        return self._send(200, json.dumps(answer).encode())

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def local_hub(models: dict[str, Path], gated: tuple[str, ...] = ()) -> Iterator[Hub]:
    """A running hub."""
    with Hub(models, gated) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
