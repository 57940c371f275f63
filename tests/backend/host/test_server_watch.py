"""The watch notices a server that is leaving, and only that."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tritium.backend.host import server_watch
from tritium.backend.host.server_watch import ServerWatch, _http_endpoint
from tritium.backend.supervisor import Supervisor


@pytest.fixture
def server(monkeypatch):
    """Answers with each of `statuses`, then repeats the last; None: an invalid answer."""
    monkeypatch.setattr(server_watch, "_INTERVAL", 0.01)
    monkeypatch.setattr(server_watch, "_TIMEOUT", 0.5)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.paths.append(self.path)
            statuses = self.server.statuses
            status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
            if status is None:
                self.wfile.write(b"\n")
            else:
                self.send_response(status)
                self.end_headers()
            if len(statuses) == 1:
                self.server.asked_last.release()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.paths, server.statuses, server.asked_last = [], [], threading.Semaphore(0)
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def watch(server, leaving: threading.Event) -> ServerWatch:
    command = ["tritonserver", "--model-repository=/m", f"--http-port={server.server_port}"]
    return ServerWatch("m", "1", leaving.set, Supervisor(), command)


def test_model_that_is_no_longer_ready_is_leaving(server):
    server.statuses = [400, 200, None, 503, 200, 400]
    leaving = threading.Event()
    watching = watch(server, leaving)
    assert leaving.wait(10)
    watching.stop()
    assert set(server.paths) == {"/v2/models/m/versions/1/ready"}
    assert len(server.paths) == 6


def test_server_that_no_longer_listens_is_leaving(server):
    server.statuses = [200]
    leaving = threading.Event()
    watching = watch(server, leaving)
    server.asked_last.acquire()
    assert not leaving.is_set()
    server.socket.close()
    assert leaving.wait(10)
    watching.stop()


@pytest.mark.parametrize("status", [400, 403, None])
def test_model_that_was_never_ready_is_not_leaving(server, status):
    server.statuses = [status]
    leaving = threading.Event()
    watching = watch(server, leaving)
    for _ in range(5):
        server.asked_last.acquire()
    watching.stop()
    assert not leaving.is_set()


@pytest.mark.parametrize(
    ("arguments", "endpoint"),
    [
        ([], ("0.0.0.0", 8000)),
        (["--http-port", "81", "--http-address=10.0.0.1", "--grpc-port=1"], ("10.0.0.1", 81)),
        (["--allow-http=true"], ("0.0.0.0", 8000)),
        (["--allow-http", "0"], None),
        (["--allow-http=False"], None),
    ],
)
def test_http_endpoint_from_the_command(arguments, endpoint):
    assert _http_endpoint(["tritonserver", "--model-repository=/m", *arguments, ""]) == endpoint
