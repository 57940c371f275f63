"""Load tests of a running server, and benchmarks."""

import backend  # noqa: F401 -- before torch, which reads what it sets
