"""`tritium serve`: ports in use, the models that it lists, the commands that it suggests."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tritium.backend.host.serve import SetupError, TritonServer, _greeting, main
from tritium.loadtests.harness import free_ports


@pytest.fixture
def ports():
    return free_ports(3)


@pytest.mark.parametrize(("place", "option"), [(0, "http"), (1, "grpc"), (2, "metrics")])
def test_a_port_in_use_is_named_and_nothing_is_started(ports, tmp_path, place, option):
    server = TritonServer(tmp_path, *ports)
    with socket.create_server(("", ports[place])), pytest.raises(SetupError) as refused:
        server.start()
    expected = f"port {ports[place]} is in use; choose another one with --{option}-port"
    assert str(refused.value) == expected
    assert server.process is None


def test_the_command_ends_with_an_error(ports, capsys, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the handlers of the test run stay
    with socket.create_server(("", ports[0])):
        assert main(["--http-port", str(ports[0])]) == 1
    assert f"error: port {ports[0]} is in use" in capsys.readouterr().err


@pytest.fixture
def index(ports):
    """Answers as Triton Server does when asked for its models; `server.answer` may change."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            status, body = self.server.answer
            assert self.path == "/v2/repository/index"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", ports[0]), Handler) as server:
        server.answer = (
            200,
            b'[{"name": "b", "version": "1", "state": "READY"}, {"name": "c"},'
            b' {"name": "d", "state": "UNAVAILABLE"}, {"name": "a", "state": "READY"}]',
        )
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_ready_models_are_listed(ports, index):
    assert TritonServer(http_port=ports[0]).ready_models() == ["a", "b"]


def test_a_server_that_does_not_list_its_models(ports, index):
    index.answer = (403, b"")
    assert TritonServer(http_port=ports[0]).ready_models() == []


def test_the_greeting_names_models_and_ports():
    server = TritonServer(http_port=1, grpc_port=2, metrics_port=3)
    greeting = _greeting(server, ["ensemble", "smollm2"])
    assert "Ready. Models: ensemble, smollm2." in greeting
    assert "tritium chat --url localhost:2\n" in greeting
    assert "localhost:1/v2/models/smollm2/generate_stream" in greeting
    assert "localhost:3/metrics" in greeting
    assert "tritium chat --model mine\n" in _greeting(TritonServer(), ["mine"])
    assert _greeting(server, []) == "\nReady at localhost:1.\n"
