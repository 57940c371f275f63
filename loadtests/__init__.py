"""Load tests of a running server, and benchmarks."""

from tritium import backend  # noqa: F401 -- before torch, which reads what it sets
