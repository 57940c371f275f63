"""What the GPU path should cost, and the one command that checks and measures it on a GPU."""
