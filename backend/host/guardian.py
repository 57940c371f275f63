"""Ends Triton Server when this process is killed.

Triton Server (2.51) does not start a model's process again, goes on calling the model ready, and
leaves open the gRPC streams that were waiting for it. A server that ends is noticed by everyone:
its clients get errors, and whoever runs it starts it again.
"""

import os
import subprocess

_SECONDS = 10  # that requests of other models may go on

# Reads a pipe that only the guarded process holds open: its end is the end of that process.
_SCRIPT = f"""
read -r orderly && exit
echo "the process of $1 has died: Triton Server is told to end (parameter exit_on_crash)" >&2
kill -TERM "$0" || exit
sleep {_SECONDS}
kill -KILL "$0"
"""


class Guardian:
    """A shell that waits for the end of this process, and ends its parent then.

    Args:
        name: Of the model, for the message.
    """

    def __init__(self, name: str) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, str(os.getppid()), name],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """This process is going to end as it should."""
        self._shell.communicate(b"orderly\n")
