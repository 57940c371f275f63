"""The engine, and what stands between it and Triton Server."""

import os

# Read when torch loads its OpenMP. By default its threads spin while they wait for each other; on
# cores shared with a server and its clients, whoever waits then keeps the core from whom it waits
# for. Measured beside one busy process on 2 cores: a step's matrix products took 830 ms spinning,
# 24 ms passive (28 ms on one thread alone).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
