"""Benchmarks of the engine's parts: expected costs, measured costs, and a check of a GPU."""

from tritium import backend  # noqa: F401 -- before torch, which reads what it sets
