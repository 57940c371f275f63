"""What the engine's steps should cost and do cost, and the command that checks it on a GPU."""

from tritium import backend  # noqa: F401 -- before torch, which reads what it sets
