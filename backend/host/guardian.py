"""Ends Triton Server when this process is killed.

Triton Server (2.51) does not restart a model's process. It keeps reporting the model as ready and
leaves its open gRPC streams waiting. If the server ends instead, its clients get errors and its
supervisor restarts it.
"""

import os
import subprocess

_SECONDS = 10  # for which requests of other models may continue

# Reads a pipe that only the guarded process holds open, and that closes when the process ends.
_SCRIPT = f"""
read -r orderly && exit
echo "the process of $1 has died: Triton Server is told to end (parameter exit_on_crash)" >&2
kill -TERM "$0" || exit
sleep {_SECONDS}
kill -KILL "$0"
"""


class Guardian:
    """A shell process that ends this process's parent if this process dies.

    Args:
        name: The model's name, for the message.
    """

    def __init__(self, name: str) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, str(os.getppid()), name],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Stop guarding: this process is about to end in an orderly way."""
        self._shell.communicate(b"orderly\n")
