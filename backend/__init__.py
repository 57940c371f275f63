"""The engine, and everything between it and Triton Server."""

import os

# How long an OpenMP thread spins before it sleeps; read when torch loads OpenMP. The default is
# almost forever: on cores shared with other processes, spinning threads then take the core from the
# thread that they wait for. A step's matrix products beside one busy process on 2 cores: 350 to
# 830 ms with the default, 67 ms with this value, 24 ms without spinning. A step of one sequence on
# idle cores, likewise: 55 to 71 ms, 55 to 64 ms, 81 to 96 ms.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Large tensors in pages of 2 MiB; read at torch's first allocation. Attention over a cache of
# 150 MB takes 31 ms with pages of 4 KiB and 16 to 20 ms with this.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
