"""Notices early that Triton Server is about to unload the model or to exit.

Triton Server (2.51) calls finalize() only when the model has no requests left. A long stream thus
keeps the model loaded, and delays the server's exit until its timeout breaks off all requests. The
signs that come earlier: a model to be unloaded is no longer ready, and an exiting server closes its
endpoints first. Readiness is polled over HTTP, since pb_utils.is_model_ready() hangs in a server
that exits while it streams, and blocks all responses.
"""

import argparse
import http.client
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from tritium.backend.supervisor import Supervisor

logger = logging.getLogger("tritium")

_INTERVAL = 0.5  # seconds
_TIMEOUT = 5.0  # seconds; long, so that a slow server is not taken for an exiting one


class ServerWatch:
    """Polls the model's readiness twice per second, on a thread of its own.

    Calls `on_leaving` when a model that was ready is not ready any more. Without an accessible HTTP
    endpoint (`--allow-http=false`, or a restricted one) it notices nothing.

    Args:
        model_name: The model's name on the server.
        model_version: The model's version on the server.
        on_leaving: Called at most once, on the watch's thread.
        supervisor: Starts the thread.
        command: The server's command line; None: that of this process's parent.
    """

    def __init__(
        self,
        model_name: str,
        model_version: str,
        on_leaving: Callable[[], None],
        supervisor: Supervisor,
        command: list[str] | None = None,
    ) -> None:
        self._path = f"/v2/models/{model_name}/versions/{model_version}/ready"
        self._on_leaving = on_leaving
        self._endpoint = _http_endpoint(command or _command_of(os.getppid()))
        self._stopping = threading.Event()
        self._thread = supervisor.start("server watch", self._run)

    def stop(self) -> None:
        """Stop polling; if `on_leaving` is running, wait for it."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        was_ready = False
        while self._endpoint and not self._stopping.wait(_INTERVAL):
            is_ready = self._is_ready(*self._endpoint)
            was_ready = was_ready or is_ready is True
            if was_ready and is_ready is False:
                logger.info("Triton Server is going to unload the model")
                self._on_leaving()
                return

    def _is_ready(self, address: str, port: int) -> bool | None:
        """Whether the model is ready; None: unknown, as the server did not answer."""
        connection = http.client.HTTPConnection(address, port, timeout=_TIMEOUT)
        try:
            connection.request("GET", self._path)
            status = connection.getresponse().status
        except ConnectionRefusedError:
            return False
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return {200: True, 400: False}.get(status)


def _command_of(process_id: int) -> list[str]:
    return Path(f"/proc/{process_id}/cmdline").read_text().split("\0")


def _http_endpoint(command: list[str]) -> tuple[str, int] | None:
    """(address, port) of the HTTP endpoint by a server's command line; None: it has none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--allow-http", default="true")
    parser.add_argument("--http-address", default="0.0.0.0")
    parser.add_argument("--http-port", type=int, default=8000)
    options, _ = parser.parse_known_args(command)
    if options.allow_http.lower() in ("false", "0"):
        return None
    return options.http_address, options.http_port
