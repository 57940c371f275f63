"""Threads that fail: who is told, and how the process ends."""

import subprocess
import sys
import threading

import pytest

from tritium.backend.supervisor import Supervisor


def fail() -> None:
    raise ValueError("broken")


def test_all_are_told_in_order_and_once(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor()
    told: list[str] = []

    def raises() -> None:
        told.append(f"first, on {threading.current_thread().name}")
        raise OSError("full")

    supervisor.on_failure(raises)
    supervisor.on_failure(lambda: told.append(f"second: {supervisor.reason}"))
    supervisor.start("fine", lambda: None).join()
    assert not supervisor.reason
    supervisor.start("sink", fail).join()
    supervisor.start("other", fail).join()
    reason = "the model's thread 'sink' has failed: ValueError('broken')"
    assert told == ["first, on sink", f"second: {reason}"]
    assert [r.message for r in caplog.records if r.levelname == "CRITICAL"] == [
        "the thread 'sink' has failed",
        "the thread 'other' has failed",
    ]


PROGRAM = """
import threading, time
from tritium.backend import supervisor
supervisor._EXIT_SECONDS = 0.3
watched = supervisor.Supervisor(exits=True)
watched.on_failure(lambda: print("told", flush=True))
{hang}
watched.start("sink", lambda: 1 / 0)
time.sleep(30)
"""


@pytest.mark.parametrize("hang", ["", "watched.on_failure(lambda: time.sleep(30))"])
def test_the_process_ends_even_if_a_callback_hangs(hang: str) -> None:
    program = PROGRAM.format(hang=hang)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"told\n")
