"""What Triton Server loads; everything is in `backend`."""

from tritium.backend.trtllm.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
