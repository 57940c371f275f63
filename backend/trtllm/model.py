"""The relay model for TensorRT-LLM's contract, as Triton Server's Python backend loads it.

Each request has a thread here, since a BLS call blocks. Their number is not limited: the main model
refuses excess requests at once.
"""

import json
import threading
from collections.abc import Iterator
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from tritium.backend.errors import InvalidArgument, RequestError, Unavailable
from tritium.backend.trtllm import handover
from tritium.backend.trtllm.contract import (
    INPUTS,
    OUTPUTS,
    Translation,
    response_tensors,
    translate,
    wants_error_code,
)

_POLL_SECONDS = 0.2  # cancellations
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """The class that Triton Server's Python backend calls."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Add what config.pbtxt omits: tensors, batch dimension, decoupled responses."""
        config = auto_complete_model_config
        for name, data_type, dims in INPUTS:
            config.add_input({"name": name, "data_type": data_type, "dims": dims, "optional": True})
        for name, data_type, dims in OUTPUTS:
            config.add_output({"name": name, "data_type": data_type, "dims": dims})
        config.set_max_batch_size(1)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        if "model" not in parameters:
            raise ValueError("config.pbtxt: parameter 'model' is missing (the main model's name)")
        self._main_model = parameters["model"]["string_value"]
        self._live: set[_Relay] = set()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher")
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            relay = _Relay(self._main_model, request, wants_error_code(inputs))
            try:
                translation = translate(inputs, request.parameters())
                self._live.add(relay)
                threading.Thread(target=self._run, args=(relay, translation), daemon=True).start()
            except UnicodeDecodeError:  # HTTP clients can send any bytes as parameters
                relay.fail(InvalidArgument("request parameters: not valid UTF-8"))
            except Exception as error:  # noqa: BLE001 -- the request must get an answer
                relay.fail(error)

    def finalize(self) -> None:
        self._stopping.set()
        self._watcher.join()

    def _run(self, relay: "_Relay", translation: Translation) -> None:
        try:
            relay.run(translation)
        finally:
            self._live.discard(relay)

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_SECONDS):
            for relay in list(self._live):
                try:
                    relay.cancel_if_client_did()
                except Exception as error:  # noqa: BLE001 -- the thread serves all requests
                    pb_utils.Logger.log_error(f"a request could not be cancelled: {error!r}")


class _Relay:
    """Passes one request to the main model and its responses to the client; ends exactly once."""

    def __init__(self, main_model: str, request: Any, with_error_code: bool) -> None:
        self._main_model = main_model
        self._timeout = request.timeout()  # microseconds
        self._sender = request.get_response_sender()
        self._with_error_code = with_error_code
        self._id = handover.new_id()
        self._arrived = False  # the main model has sent its first response, which is empty
        self._cancelling = False
        self._ended = False
        self._lock = threading.Lock()  # guards _ended; after the end the sender is not used

    def run(self, translation: Translation) -> None:
        """Relay until the final response. Never raises."""
        try:
            for response in self._exec(self._id, translation):
                if response.has_error():  # from BLS; the main model's errors are finish reasons
                    gone = not pb_utils.is_model_ready(self._main_model)
                    self.fail((Unavailable if gone else RequestError)(response.error().message()))
                elif outputs := {t.name(): t.as_numpy() for t in response.output_tensors()}:
                    self._send_on(outputs, translation)
                else:
                    self._arrived = True
            # No effect after a final response.
            self.fail(Unavailable(f"the model '{self._main_model}' broke off"))
        except Exception as error:  # noqa: BLE001 -- the request must get an answer
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with an error, unless the request has ended."""
        if not isinstance(error, RequestError):
            pb_utils.Logger.log_error(f"a request failed: {error!r}")
            error = RequestError(f"internal error: {error!r}")
        message = f"{error.grpc_status}: {error}" if self._with_error_code else str(error)
        triton_error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, error.code))
        self._send(pb_utils.InferenceResponse(error=triton_error), final=True)

    def cancel_if_client_did(self) -> None:
        with self._lock:
            if self._ended or self._cancelling or not self._arrived:
                return
            if not self._sender.is_cancelled():
                return
            self._cancelling = True
        for _ in self._exec(handover.cancel(self._id)):
            pass

    def _send_on(self, outputs: dict[str, NDArray[Any]], translation: Translation) -> None:
        finish_reason = outputs["finish_reason"].item().decode()
        if error := handover.read_error(finish_reason):
            self.fail(type(error)(translation.with_own_names(str(error))))
        else:
            tensors = [pb_utils.Tensor(*t) for t in response_tensors(outputs).items()]
            self._send(pb_utils.InferenceResponse(tensors), final=finish_reason != "None")

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            if not self._ended:
                self._ended = final
                self._sender.send(response, flags=_FINAL if final else 0)

    def _exec(self, request_id: str, translation: Translation | None = None) -> Iterator[Any]:
        """The main model's responses; without a translation, to a request that has only an id."""
        request = pb_utils.InferenceRequest(
            model_name=self._main_model,
            request_id=request_id,
            inputs=[pb_utils.Tensor(*i) for i in translation.inputs.items()] if translation else [],
            requested_output_names=translation.outputs if translation else ["text_output"],
            timeout=self._timeout,
        )
        responses: Iterator[Any] = request.exec(decoupled=True)
        return responses
