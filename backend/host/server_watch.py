"""Notices that Triton Server is about to unload the model, or to end.

Triton Server (2.51) calls finalize() only when the model has no request left: a stream that goes on
keeps the model loaded, and keeps a server that was told to stop until its exit timeout breaks off
what is left. Here is who tells the model in time: a model that is asked to leave is not ready any
more, and a server that is asked to end closes its endpoints first. It is asked over HTTP, since
pb_utils.is_model_ready() hangs, and all responses with it, in a server that ends while it streams.
"""

import argparse
import http.client
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("tritium")

_INTERVAL = 0.5  # seconds
_TIMEOUT = 5.0  # seconds; a server that is merely slow is not one that ends


class ServerWatch:
    """Asks the server twice a second, on a thread of its own, from the first time it said yes.

    Without an HTTP endpoint (`--allow-http=false`, or one that is restricted) nothing is noticed.

    Args:
        model_name: This model, as the server calls it.
        model_version: Likewise.
        on_leaving: Called once, on that thread.
        command: Of the server; default: of the process that started this one.
    """

    def __init__(
        self,
        model_name: str,
        model_version: str,
        on_leaving: Callable[[], None],
        command: list[str] | None = None,
    ) -> None:
        self._path = f"/v2/models/{model_name}/versions/{model_version}/ready"
        self._on_leaving = on_leaving
        self._endpoint = _http_endpoint(command or _command_of(os.getppid()))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for `on_leaving` where it was called; else it never will be."""
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
        """None where that can't be found out now."""
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
    """(address, port) where a server that was started by this command answers, if it does."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--allow-http", default="true")
    parser.add_argument("--http-address", default="0.0.0.0")
    parser.add_argument("--http-port", type=int, default=8000)
    options, _ = parser.parse_known_args(command)
    if options.allow_http.lower() in ("false", "0"):
        return None
    return options.http_address, options.http_port
