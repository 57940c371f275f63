"""The client against scripted servers: its requests, and how it reads answers and errors."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from tritium.client import (
    Client,
    Delta,
    GenerationError,
    GenerationStream,
    GrpcClient,
    HttpClient,
    Usage,
)
from tritium.client.__main__ import build_parser, main, sampling_parameters
from tritium.client.chat import Chat
from tritium.client.request import request_fields
from tritium.client.sse import parse_events

USAGE = {
    "prompt_tokens": 3,
    "cached_tokens": 0,
    "output_tokens": 2,
    "queue_ms": 0.5,
    "ttft_ms": 12.0,
    "total_ms": 30.0,
}
ANSWER = [
    {"text_output": "Grüße", "finish_reason": "None", "num_output_tokens": 1},
    {"text_output": " 🙂", "finish_reason": "stop", "num_output_tokens": 1, "usage": USAGE},
]
DELTAS = [
    Delta("Grüße", None, None, 1),
    Delta(" 🙂", "stop", Usage(**USAGE), 1),
]


# -- requests and responses --


def test_request_fields_of_a_prompt():
    assert request_fields("Hi", sampling={"seed": 1}, business_line="search") == {
        "text_input": "Hi",
        "stream": True,
        "return_finish_reason": True,
        "return_num_output_tokens": True,
        "return_usage": True,
        "return_error_code": True,
        "sampling_parameters": '{"seed": 1}',
        "business_line": "search",
    }


def test_deadline_is_a_number():
    assert request_fields("Hi", deadline_ms=250)["deadline_ms"] == 250
    assert "deadline_ms" not in request_fields("Hi")


def test_request_fields_of_messages():
    messages = [{"role": "user", "content": "Grüße"}]
    fields = request_fields(None, messages=messages)
    assert json.loads(fields["messages"]) == messages
    assert "text_input" not in fields


@pytest.mark.parametrize("messages", [None, [{"role": "user", "content": "x"}]])
def test_prompt_and_messages_exclude_each_other(messages):
    with pytest.raises(ValueError, match="exactly one"):
        request_fields("x" if messages else None, messages=messages)


def test_n_above_1_is_refused():
    with pytest.raises(ValueError, match="n must be 1, got 2"):
        request_fields("x", sampling={"n": 2})


def test_usage_ignores_unknown_keys():
    assert Usage.from_json(json.dumps(USAGE | {"color": 1})) == Usage(**USAGE)


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (b'data: {"a": 1}\n\ndata: {"b": 2}\n\n', ['{"a": 1}', '{"b": 2}']),
        (b"data:x\r\n\r\n", ["x"]),
        (b"data: x\ndata: y\n\n", ["x\ny"]),
        (b": comment\nevent: token\nid: 7\ndata: x\n\n", ["x"]),
        (b"\n\n\ndata: x", ["x"]),
        ("data: Grüße 🙂\n\n".encode(), ["Grüße 🙂"]),
        (b"", []),
    ],
)
def test_parse_events(body, events):
    assert list(parse_events(body.splitlines(keepends=True))) == events


# -- the stream --


def test_stream_without_finish_reason_is_an_error():
    stream = GenerationStream(iter([Delta("a")]), lambda: None)
    assert next(stream) == Delta("a")
    with pytest.raises(GenerationError, match="broke off"):
        next(stream)


def test_stream_aborts_at_the_end_of_its_block():
    aborts: list[str] = []
    with GenerationStream(iter(DELTAS), lambda: aborts.append("abort")) as stream:
        assert next(stream) == DELTAS[0]
    assert aborts == ["abort"]


def test_cancelled_stream_ends_without_error():
    def deltas() -> Iterator[Delta]:
        yield DELTAS[0]
        raise GenerationError("CANCELLED", "torn down")

    stream = GenerationStream(deltas(), lambda: None)
    next(stream)
    stream.cancel()
    assert list(stream) == []


# -- both transports against a scripted server --


class FakeServer:
    """Answers every request by one script: deltas as output dicts, exceptions, or pauses."""

    def __init__(self) -> None:
        self.script: list[Any] = ANSWER
        self.requests: list[dict[str, Any]] = []
        self.client_left = threading.Event()

    def play(self, alive: Callable[[], bool]) -> Iterator[Any]:
        for step in self.script:
            if isinstance(step, float):
                deadline = time.monotonic() + step
                while time.monotonic() < deadline:
                    time.sleep(0.01)
                    if not alive():
                        self.client_left.set()
                        return
            else:
                yield step


class GrpcFake(FakeServer, service_pb2_grpc.GRPCInferenceServiceServicer):
    def ServerLive(self, request, context):
        return service_pb2.ServerLiveResponse(live=True)

    def ModelStreamInfer(self, requests, context):
        request = next(requests)
        fields: dict[str, Any] = {"model": request.model_name}
        for tensor in request.inputs:
            assert list(tensor.shape) == [1]
            contents = tensor.contents
            values = contents.bool_contents or [contents.bytes_contents[0].decode()]
            assert tensor.datatype == ("BOOL" if contents.bool_contents else "BYTES")
            fields[tensor.name] = values[0]
        self.requests.append(fields)
        assert "triton_grpc_error" not in dict(context.invocation_metadata())
        context.add_callback(self.client_left.set)
        for step in self.play(context.is_active):
            if isinstance(step, GenerationError):
                context.abort(grpc.StatusCode[step.code], step.message)
            yield _grpc_response(step)


def _grpc_response(outputs: dict[str, Any] | str) -> service_pb2.ModelStreamInferResponse:
    if isinstance(outputs, str):
        return service_pb2.ModelStreamInferResponse(error_message=outputs)
    response = service_pb2.ModelInferResponse(model_name="fake")
    for name, value in outputs.items():
        if isinstance(value, int):
            response.outputs.add(name=name, datatype="UINT32", shape=[1])
            response.raw_output_contents.append(np.array([value], np.uint32).tobytes())
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            response.outputs.add(name=name, datatype="BYTES", shape=[1])
            array = np.array([text.encode()], dtype=object)
            response.raw_output_contents.append(serialize_byte_tensor(array).item())
    return service_pb2.ModelStreamInferResponse(infer_response=response)


@pytest.fixture
def grpc_fake() -> Iterator[tuple[GrpcFake, GrpcClient]]:
    fake = GrpcFake()
    server = grpc.server(futures.ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("localhost:0")
    server.start()
    yield fake, GrpcClient(f"localhost:{port}", "fake")
    server.stop(None).wait()


class HttpFake(FakeServer):
    status = 200
    refusal = b""


@pytest.fixture
def http_fake() -> Iterator[tuple[HttpFake, HttpClient]]:
    fake = HttpFake()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            model = self.path.removeprefix("/v2/models/").removesuffix("/generate_stream")
            fake.requests.append({"model": model} | json.loads(body))
            self.send_response(fake.status)
            if fake.status != 200:
                self.send_header("Content-Length", str(len(fake.refusal)))
                self.end_headers()
                self.wfile.write(fake.refusal)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for step in fake.play(self._alive):
                if step is None:  # break off
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                outputs = {"error": step} if isinstance(step, str) else dict(step)
                if "usage" in outputs:
                    outputs["usage"] = json.dumps(outputs["usage"])
                event = f"data: {json.dumps(outputs, ensure_ascii=False)}\n\n".encode()
                for half in (event[:20], event[20:]):  # chunks that split events and characters
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(half), half))
            self.wfile.write(b"0\r\n\r\n")

        def _alive(self) -> bool:
            self.connection.settimeout(0.001)
            try:
                return self.connection.recv(1) != b""
            except TimeoutError:
                return True
            finally:
                self.connection.settimeout(None)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # clients hang up on purpose
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield fake, HttpClient(f"http://localhost:{server.server_port}", "fake")
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["grpc_fake", "http_fake"])
def fake_and_client(request) -> tuple[FakeServer, Client]:
    return request.getfixturevalue(request.param)


def test_stream_and_generate(fake_and_client):
    fake, client = fake_and_client
    assert list(client.stream("Hi", sampling={"max_tokens": 2})) == DELTAS
    answer = client.generate(messages=[{"role": "user", "content": "Grüße"}])
    assert (answer.text, answer.finish_reason, answer.usage) == ("Grüße 🙂", "stop", Usage(**USAGE))
    first, second = fake.requests
    assert first == {"model": "fake"} | request_fields("Hi", sampling={"max_tokens": 2})
    assert json.loads(second["messages"]) == [{"role": "user", "content": "Grüße"}]


def test_final_response_without_outputs(fake_and_client):
    fake, client = fake_and_client
    fake.script = [*ANSWER, {}]
    assert client.generate("Hi").text == "Grüße 🙂"


def test_answer_that_breaks_off(fake_and_client):
    fake, client = fake_and_client
    fake.script = ANSWER[:1]
    with pytest.raises(GenerationError, match="broke off"):
        client.generate("Hi")


def test_error_without_a_code(fake_and_client):
    fake, client = fake_and_client
    fake.script = [ANSWER[0], "it broke"]
    stream = client.stream("Hi")
    assert next(stream) == DELTAS[0]
    with pytest.raises(GenerationError) as caught:
        next(stream)
    assert (caught.value.code, caught.value.message) == ("UNKNOWN", "it broke")


@pytest.mark.parametrize("script", [[10.0], [ANSWER[0], 10.0]], ids=["before", "amid"])
def test_timeout_bounds_the_whole_answer(fake_and_client, script):
    fake, client = fake_and_client
    fake.script = script
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        client.generate("Hi", timeout=0.2)
    assert time.monotonic() - start < 2
    assert fake.client_left.wait(2)


def test_timeout_of_a_slow_stream(fake_and_client):
    fake, client = fake_and_client
    fake.script = [ANSWER[0], 0.05] * 100
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        client.generate("Hi", timeout=0.3)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("script", [[10.0], [ANSWER[0], 10.0]], ids=["before", "amid"])
def test_cancel_from_another_thread(fake_and_client, script):
    fake, client = fake_and_client
    fake.script = script
    stream = client.stream("Hi")
    threading.Timer(0.2, stream.cancel).start()
    assert len(list(stream)) == len(script) - 1
    assert fake.client_left.wait(2)


def test_break_cancels(fake_and_client):
    fake, client = fake_and_client
    fake.script = [ANSWER[0], 10.0]
    for _ in client.stream("Hi"):
        break
    assert fake.client_left.wait(2)


def test_unread_stream_cancels(fake_and_client):
    fake, client = fake_and_client
    fake.script = [10.0]
    with client.stream("Hi"):
        while not fake.requests:
            time.sleep(0.01)
    assert fake.client_left.wait(2)


def test_cancelled_streams_leave_no_threads(fake_and_client):
    fake, client = fake_and_client
    fake.script = [ANSWER[0], 10.0]
    before = threading.active_count()
    for _ in range(10):
        with client.stream("Hi") as stream:
            next(stream)
        assert fake.client_left.wait(2)
        fake.client_left.clear()
    deadline = time.monotonic() + 5
    # The fake gRPC server keeps its pool of 16.
    while threading.active_count() > before + 16 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before + 16
    assert "_consume_request_iterator" not in {t.name for t in threading.enumerate()}


def test_call_is_read_to_its_end_after_an_error(grpc_fake):
    """Triton Server 2.51 can't unload a model if a call is cancelled right after an error."""
    fake, client = grpc_fake
    fake.script = ["it broke", 0.2]
    started = time.monotonic()
    with pytest.raises(GenerationError, match="it broke"):
        client.generate("Hi")
    assert time.monotonic() - started >= 0.2


def test_grpc_status_becomes_the_code(grpc_fake):
    fake, client = grpc_fake
    fake.script = [GenerationError("INVALID_ARGUMENT", "temperature must be at least 0")]
    with pytest.raises(GenerationError) as caught:
        client.generate("Hi")
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.message == "temperature must be at least 0"


@pytest.mark.parametrize(
    ("status", "refusal", "code", "message"),
    [
        (400, b'{"error":"bad"}', "INVALID_ARGUMENT", "bad"),
        (400, b'data: {"error":"bad"}\n\n', "INVALID_ARGUMENT", "bad"),
        (404, b'{"error":"no model"}', "NOT_FOUND", "no model"),
        (503, b'{"error":"full"}', "UNAVAILABLE", "full"),
        (502, b"<html>", "UNKNOWN", "<html>"),
        (418, b"", "UNKNOWN", "HTTP status 418 I'm a Teapot"),
    ],
)
def test_http_status_becomes_the_code(http_fake, status, refusal, code, message):
    fake, client = http_fake
    fake.status, fake.refusal = status, refusal
    with pytest.raises(GenerationError) as caught:
        client.generate("Hi")
    assert (caught.value.code, caught.value.message) == (code, message)


def test_code_in_the_message_becomes_the_code(fake_and_client):
    fake, client = fake_and_client
    fake.script = ["UNAVAILABLE: queue full: 3: try again"]
    with pytest.raises(GenerationError) as caught:
        client.generate("Hi")
    assert (caught.value.code, caught.value.message) == ("UNAVAILABLE", "queue full: 3: try again")


def test_http_connection_that_breaks(http_fake):
    fake, client = http_fake
    fake.script = [ANSWER[0], None]
    with pytest.raises(GenerationError) as caught:
        client.generate("Hi")
    assert caught.value.code == "UNAVAILABLE"


def test_http_url_is_checked():
    with pytest.raises(ValueError, match="http://host:port"):
        HttpClient("localhost:8000")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("transport", [GrpcClient, HttpClient])
def test_error_names_unreachable_server(transport, free_port):
    scheme = "http://" if transport is HttpClient else ""
    client = transport(f"{scheme}localhost:{free_port}")
    for call in (lambda: client.generate("Hi"), lambda: client.connect(5)):
        with pytest.raises(GenerationError, match=f"localhost:{free_port}") as caught:
            call()
        assert caught.value.code == "UNAVAILABLE"


def test_connect(fake_and_client):
    fake, client = fake_and_client
    client.connect(5)
    assert fake.requests == []


# -- the command line --


def test_sampling_options():
    named = ["--max-tokens", "8", "--top-p", "0.5", "--stop", "a", "--stop", "b"]
    others = ["--param", "top_k=5", "--param", "logit_bias={}", "--param", "request=plain"]
    args = build_parser().parse_args(["generate", "x", *named, *others])
    assert sampling_parameters(args) == {
        "max_tokens": 8,
        "temperature": 0,
        "top_p": 0.5,
        "stop": ["a", "b"],
        "top_k": 5,
        "logit_bias": {},
        "request": "plain",
    }


def test_malformed_param(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "x", "--param", "top_k"])
    assert "expected KEY=VALUE, got 'top_k'" in capsys.readouterr().err


def test_generate_prints_answer_and_usage(http_fake, capsys):
    fake, client = http_fake
    url = ["--http", "--url", client._url, "--model", "fake"]
    assert main(["generate", "Hi", "--usage", *url]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Grüße 🙂\n"
    assert "prompt 3 tokens (0 cached), output 2 tokens" in printed.err
    assert main(["generate", "Hi", "--raw", *url]) == 0
    chat, raw = fake.requests
    assert json.loads(chat["messages"]) == [{"role": "user", "content": "Hi"}]
    assert raw["text_input"] == "Hi"


def test_errors_are_one_line(http_fake, capsys):
    fake, client = http_fake
    fake.status, fake.refusal = 503, b'{"error":"full"}'
    assert main(["generate", "Hi", "--http", "--url", client._url]) == 1
    assert capsys.readouterr().err == "error: UNAVAILABLE: full\n"


class ScriptedClient(Client):
    """Answers with `script`, each entry the deltas of one answer or an error."""

    def connect(self, timeout):
        pass

    def __init__(self, *script: list[Delta] | GenerationError) -> None:
        self.script = list(script)
        self.messages: list[list[dict[str, str]]] = []

    def _open(self, fields, timeout):
        self.messages.append(json.loads(fields["messages"]))
        answer = self.script.pop(0)

        def deltas() -> Iterator[Delta]:
            if isinstance(answer, GenerationError):
                raise answer
            yield from answer

        return GenerationStream(deltas(), lambda: None)


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def test_chat_remembers_until_reset():
    client = ScriptedClient(DELTAS, DELTAS, DELTAS)
    chat = Chat(client, {}, system="Be brief.")
    assert list(chat.ask("one")) == ["Grüße", " 🙂"]
    list(chat.ask("two"))
    chat.reset()
    list(chat.ask("three"))
    assert [contents(messages) for messages in client.messages] == [
        ["Be brief.", "one"],
        ["Be brief.", "one", "Grüße 🙂", "two"],
        ["Be brief.", "three"],
    ]


def test_chat_keeps_the_shown_part_of_a_stopped_answer():
    chat = Chat(ScriptedClient(DELTAS), {})
    pieces = chat.ask("one")
    next(pieces)
    pieces.close()
    assert contents(chat.turns) == ["one", "Grüße"]


def test_chat_forgets_a_failed_question():
    chat = Chat(ScriptedClient(GenerationError("UNAVAILABLE", "full")), {})
    with pytest.raises(GenerationError):
        list(chat.ask("one"))
    assert chat.turns == []


def test_chat_drops_the_oldest_turns_when_too_long():
    too_long = GenerationError("INVALID_ARGUMENT", "messages: ... (max_model_len is 8, ...)")
    client = ScriptedClient(DELTAS, DELTAS, too_long, DELTAS)
    chat = Chat(client, {})
    for question in ("one", "two", "three"):
        list(chat.ask(question))
    assert contents(client.messages[-2]) == ["one", "Grüße 🙂", "two", "Grüße 🙂", "three"]
    assert contents(client.messages[-1]) == ["two", "Grüße 🙂", "three"]
