"""The model as Triton Server's Python backend loads it: lifecycle, requests in, responses out.

Only this file, accounts/metrics.py and trtllm/model.py use the Python backend's types. `Front` and
the packages below it do the work.
"""

import gc
import json
import logging
import sqlite3
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from tritium.backend.config import ConfigError, EngineConfig
from tritium.backend.errors import InvalidArgument, RequestError
from tritium.backend.front.protocol import INPUTS, OUTPUTS, wants_error_code
from tritium.backend.host.logs import JsonFormatter
from tritium.backend.trtllm import handover

if TYPE_CHECKING:
    from tritium.backend.front.front import Front

logger = logging.getLogger("tritium")

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """The class that Triton Server's Python backend calls."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Add what config.pbtxt omits: tensors and decoupled responses."""
        config = auto_complete_model_config
        max_batch_size = config.as_dict()["max_batch_size"]
        if max_batch_size != 0:
            raise ConfigError(
                f"config.pbtxt: max_batch_size can't be {max_batch_size}. It must be 0: "
                "the engine makes its own batches"
            )
        EngineConfig.from_parameters(config.as_dict()["parameters"])  # to report errors early
        for spec in INPUTS:
            config.add_input({**spec._asdict(), "optional": True})
        for spec in OUTPUTS:
            config.add_output(spec._asdict())
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        self._handed_over: WeakValueDictionary[str, _HandedOver] = WeakValueDictionary()
        # What holds threads, files or processes is noted here as soon as it exists. So if loading
        # fails, all of it ends and the error is reported: a thread would keep the process alive.
        with ExitStack() as stack:
            self._front = self._build(args, stack)
            self._closing = stack.pop_all()
        # The objects created so far live until the end. Excluding them from garbage collection
        # shortens a full collection, which stops the process, from 0.14 s to microseconds.
        gc.collect()
        gc.freeze()

    def _build(self, args: dict[str, str], stack: ExitStack) -> "Front":
        """Load the model and start to serve; `stack` gets what has to be closed, in order."""
        # Imported here, as the process that only completes the configuration does not need them.
        from tritium.backend.accounts.billing import Billing
        from tritium.backend.accounts.ledger import Ledger
        from tritium.backend.accounts.metrics import Metrics
        from tritium.backend.accounts.trace import TraceWriter
        from tritium.backend.engine.usage import BusyTime
        from tritium.backend.front.front import Front
        from tritium.backend.front.structured import GrammarCompiler
        from tritium.backend.front.tokenizer import Tokenizer
        from tritium.backend.front.vocabulary import Vocabulary
        from tritium.backend.host.guardian import Guardian
        from tritium.backend.host.server_watch import ServerWatch
        from tritium.backend.runner.calibration import measure_weights
        from tritium.backend.runner.model_runner import ModelRunner
        from tritium.backend.runner.models.loader import resolve
        from tritium.backend.supervisor import Supervisor

        name, version = args["model_name"], args["model_version"]
        model_config = json.loads(args["model_config"])
        config = EngineConfig.from_parameters(
            model_config["parameters"], Path(args["model_repository"])
        )
        # Once: a model of the Hub may be another one a moment later.
        config = config.model_copy(update={"model": str(resolve(config.model))})
        _start_log(config.log_format)
        begin = time.perf_counter_ns()
        # On a thread that ends: OpenMP keeps worker threads per thread that used it. With two sets
        # of them it considers the cores overcommitted, and its threads wait far more slowly.
        with ThreadPoolExecutor(1) as pool:
            device_id = int(args["model_instance_device_id"])
            runner = pool.submit(ModelRunner, config, device_id).result()
            model = runner.model.config
            max_model_len = _max_model_len(config, model.max_position_embeddings)
            weights = pool.submit(
                measure_weights, runner, config.max_num_seqs, config.max_num_batched_tokens
            ).result()
        busy_time = BusyTime(weights, warmup=time.perf_counter_ns() - begin)
        tokenizer = Tokenizer(Path(config.model))
        supervisor = Supervisor(config.exit_on_crash)
        ledger = trace = None
        if config.ledger_path:
            with _blaming("ledger_path", config.ledger_path):
                ledger = Ledger(
                    config.ledger_path,
                    name,
                    weights,
                    config.ledger_rotate_hours,
                    config.ledger_retention_days,
                    supervisor=supervisor,
                )
            stack.callback(ledger.close)
        report_vllm = model_config["parameters"].get("REPORT_CUSTOM_METRICS", {})
        metrics = Metrics(
            name,
            version,
            max_model_len,
            vllm=report_vllm.get("string_value", "").lower() in ("true", "yes"),
            business_lines=config.business_lines,
            supervisor=supervisor,
        )
        stack.callback(metrics.close)
        if config.trace_path:
            with _blaming("trace_path", config.trace_path):
                trace = TraceWriter(
                    config.trace_path, config.trace_max_size, config.block_size, supervisor
                )
            stack.callback(trace.close)
        billing = Billing(
            metrics,
            ledger,
            runner.block_bytes,
            config.price_per_hour,
            logs_requests=config.log_format == "json",
        )
        vocabulary = Vocabulary(tokenizer, model.vocab_size, model.eos_token_ids)
        grammars = GrammarCompiler(
            tokenizer.to_json(), vocabulary.size, vocabulary.eos_token_ids, tokenizer.vocab_size
        )
        stack.callback(grammars.close)
        front = Front(
            config,
            tokenizer,
            runner,
            grammars,
            max_model_len,
            vocabulary,
            metrics,
            billing,
            busy_time,
            trace,
            supervisor,
        )
        stack.callback(front.stop)
        for sink in (metrics, trace, ledger):  # they get what the front has ended
            if sink:
                supervisor.on_failure(sink.close)
        stack.callback(ServerWatch(name, version, front.stop, supervisor).stop)
        if config.exit_on_crash:
            stack.callback(Guardian(name).dismiss)
        logger.info(
            f"{name}: {runner.model.dtype} on {runner.device}, KV cache of "
            f"{runner.num_blocks} blocks of {runner.block_size} tokens "
            f"({runner.num_blocks * runner.block_bytes / 2**20:.0f} MiB)"
        )
        return front

    def execute(self, requests: list[Any]) -> None:
        """Pass the requests to the front, whose output thread sends the responses."""
        for request in requests:
            try:
                request_id, parameters = request.request_id(), request.parameters()
                inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            except Exception as error:  # noqa: BLE001 -- must cost no other request its answer
                logger.warning(f"a request could not be read: {error!r:.300}")
                _Responder(request.get_response_sender(), False).fail(_unreadable(error))
                continue
            if responder := self._responder(request, request_id, inputs):
                timeout = request.timeout() / 1e6  # microseconds
                self._front.handle(inputs, parameters, responder, timeout, request_id)

    def _responder(
        self, request: Any, request_id: str, inputs: Mapping[str, NDArray[Any]]
    ) -> "_Responder | None":
        """The request's responder; None for a request that only cancels another one."""
        sender = request.get_response_sender()
        if handover.is_cancel(request_id):
            if cancelled := self._handed_over.get(request_id):
                cancelled.cancel()
            sender.send(flags=_FINAL)
            return None
        if not handover.is_handed_over(request_id):
            return _Responder(sender, wants_error_code(inputs))
        self._handed_over[handover.cancel(request_id)] = responder = _HandedOver(sender)
        return responder

    def is_ready(self) -> bool:
        return self._front.is_ready()

    def finalize(self) -> None:
        self._closing.close()


def _unreadable(error: Exception) -> RequestError:
    if isinstance(error, UnicodeDecodeError):  # HTTP clients can send any bytes
        return InvalidArgument("request id or request parameters: not valid UTF-8")
    return InvalidArgument(f"the request can't be read: {error!r:.100}")


class _Responder:
    """Sends one request's responses."""

    def __init__(self, sender: Any, with_error_code: bool) -> None:
        self._sender = sender
        self._with_error_code = with_error_code

    def send(self, tensors: Mapping[str, NDArray[Any]], final: bool) -> None:
        response = pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in tensors.items()]
        )
        self._sender.send(response, flags=_FINAL if final else 0)

    def fail(self, error: RequestError) -> None:
        code = getattr(pb_utils.TritonError, error.code)
        message = f"{error.grpc_status}: {error}" if self._with_error_code else str(error)
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
        self._sender.send(response, flags=_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class _HandedOver(_Responder):
    """Sends the responses of a request from a relay model: see trtllm/handover.py."""

    def __init__(self, sender: Any) -> None:
        super().__init__(sender, with_error_code=False)
        self._cancelled = False
        self.send({}, final=False)

    def fail(self, error: RequestError) -> None:
        finish_reason = np.array([handover.finish_reason(error)], dtype=np.object_)
        self.send({"finish_reason": finish_reason}, final=True)

    def is_cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        self._cancelled = True


class _ServerLog(logging.Handler):
    """Writes log records to Triton Server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        log = pb_utils.Logger
        if record.levelno >= logging.ERROR:
            log.log_error(self.format(record))
        elif record.levelno >= logging.WARNING:
            log.log_warn(self.format(record))
        else:
            log.log_info(self.format(record))


def _start_log(log_format: str) -> None:
    handler: logging.Handler = _ServerLog()
    if log_format == "json":  # to stderr, as Triton Server's log would put the JSON in quotes
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [handler]


@contextmanager
def _blaming(parameter: str, path: Path) -> Iterator[None]:
    """Turns errors of a file into one that names the parameter."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"config.pbtxt: parameter '{parameter}' can't be '{path}'. "
            f"Nothing can be written there: {error}"
        ) from error


def _max_model_len(config: EngineConfig, max_position_embeddings: int) -> int:
    max_model_len = config.max_model_len or max_position_embeddings
    if max_model_len > max_position_embeddings:
        raise ConfigError(
            f"config.pbtxt: parameter 'max_model_len' can't be {max_model_len}. "
            f"The model has {max_position_embeddings} positions"
        )
    return max_model_len
