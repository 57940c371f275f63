"""The engine, and what stands between it and Triton Server."""

import os

# Read when torch loads its OpenMP: how long a thread that waits for the others spins before it
# sleeps. The default is almost for ever, and on cores shared with a server and its clients whoever
# waits then keeps the core from whom it waits for. A step's matrix products beside one busy process
# on 2 cores: 350 to 830 ms by default, 67 ms so, 24 ms without spinning; but alone on the cores a
# step of one sequence takes 55 to 71 ms by default, 55 to 64 ms so, 81 to 96 ms without spinning.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Read when torch allocates for the first time: large tensors lie in pages of 2 MiB. Attention over
# a cache of 150 MB in pages of 4 KiB: 31 ms, so 16 to 20 ms.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
