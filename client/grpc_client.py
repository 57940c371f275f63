"""The client over gRPC: one bidirectional stream per request, all on one channel.

It calls ModelStreamInfer through tritonclient's generated stub. tritonclient's own
`InferenceServerClient.start_stream` allows one stream per client and needs a thread for each, and
`stop_stream(cancel_requests=True)` leaves a blocked thread behind.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritium.client.base import Client, GenerationStream
from tritium.client.types import ConnectionLost, Delta, GenerationError

# By default gRPC doubles its pause between attempts up to two minutes, and every call in a pause
# fails at once. That is too long while a server starts.
_CHANNEL_OPTIONS = (("grpc.max_reconnect_backoff_ms", 1000),)


class GrpcClient(Client):
    """Talks to Triton Server's gRPC port, `url` being host:port."""

    def __init__(self, url: str = "localhost:8001", model: str = "smollm2") -> None:
        self._url = url
        self._model = model
        channel = grpc.insecure_channel(url, options=_CHANNEL_OPTIONS)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._infer, self._live = stub.ModelStreamInfer, stub.ServerLive

    def connect(self, timeout: float) -> None:
        try:
            self._live(service_pb2.ServerLiveRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise ConnectionLost(f"{self._url}: {error.details()}") from error

    def _open(
        self, fields: Mapping[str, str | bool | int], timeout: float | None
    ) -> GenerationStream:
        # gRPC closes the client's side after the only request, so the server ends the call when the
        # answer is complete. The timeout is a deadline that the server knows as well. The metadata
        # `triton_grpc_error` is not used: with it Triton Server 2.51 sometimes crashes.
        request = iter([_infer_request(self._model, fields)])
        call = self._infer(request, timeout=timeout)
        return GenerationStream(_deltas(call, self._url, timeout), call.cancel)


def _infer_request(
    model: str, fields: Mapping[str, str | bool | int]
) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, value in fields.items():
        tensor = request.inputs.add(name=name, shape=[1])
        if isinstance(value, bool):
            tensor.datatype = "BOOL"
            tensor.contents.bool_contents.append(value)
        elif isinstance(value, int):
            tensor.datatype = "INT64"
            tensor.contents.int64_contents.append(value)
        else:
            tensor.datatype = "BYTES"
            tensor.contents.bytes_contents.append(value.encode())
    return request


def _deltas(call: Any, url: str, timeout: float | None) -> Iterator[Delta]:
    try:
        for response in call:
            if response.error_message:
                # Read to the end: if a call is cancelled right after an error, Triton Server 2.51
                # can no longer unload the model.
                next(call, None)
                raise GenerationError.from_message(response.error_message)
            yield Delta.from_outputs(_outputs(response.infer_response))
    except grpc.RpcError as error:
        # The call itself is the error.
        raise _generation_error(call, url, timeout) from error
    finally:
        call.cancel()


def _outputs(response: service_pb2.ModelInferResponse) -> dict[str, str | int]:
    """The first element of each output: the length and bytes of a string, or an unsigned number.

    tritonclient's InferResult goes through numpy arrays, which takes 50 us more per response.
    """
    outputs: dict[str, str | int] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            size = int.from_bytes(raw[:4], "little")
            outputs[output.name] = raw[4 : 4 + size].decode()
        else:
            outputs[output.name] = int.from_bytes(raw[:4], "little")
    return outputs


def _generation_error(call: Any, url: str, timeout: float | None) -> GenerationError | TimeoutError:
    code, details = call.code(), call.details()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TimeoutError(f"no complete answer from {url} within {timeout} s")
    if code is grpc.StatusCode.UNAVAILABLE:
        # gRPC does not tell a refusal by the server from a failed connection, so name the server.
        return ConnectionLost(f"{url}: {details}")
    return GenerationError(code.name, details)
