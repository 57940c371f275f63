"""The operations of a model on CPUs, in C: see `operations.py`."""

from tritium.kernels.cpu.operations import *  # noqa: F403
