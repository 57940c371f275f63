"""The threads that serve a model: when one of them fails, nothing goes on as if it still ran."""

import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger("tritium")

_EXIT_SECONDS = 10  # for which the callbacks may take before the process ends without them


class Supervisor:
    """Starts threads. If one of them raises, all requests get an error and the process ends.

    Args:
        exits: Whether the process ends; if not, the model refuses all further requests.
    """

    def __init__(self, exits: bool = False) -> None:
        self._exits = exits
        self.reason = ""  # why a thread has failed; "": none has
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def on_failure(self, callback: Callable[[], object]) -> None:
        """Call this when a thread has failed, on that thread, in the order given.

        Each callback is called, whatever the others raise.
        """
        self._callbacks.append(callback)

    def start(
        self, name: str, function: Callable[[], None], daemon: bool = True
    ) -> threading.Thread:
        """Start a thread that runs the function.

        Args:
            daemon: Whether the process may end while it runs.
        """

        def run() -> None:
            try:
                function()
            except BaseException as error:
                logger.critical(f"the thread '{name}' has failed", exc_info=True)
                self._fail(f"the model's thread '{name}' has failed: {error!r:.300}")

        thread = threading.Thread(target=run, name=name, daemon=daemon)
        thread.start()
        return thread

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self.reason:
                return
            self.reason = reason
        if self._exits:
            exit_anyway = threading.Timer(_EXIT_SECONDS, os._exit, [1])
            exit_anyway.daemon = True
            exit_anyway.start()
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a failed model could not be ended in order")
        if self._exits:
            os._exit(1)
