"""What Triton Server loads; everything is in `backend`."""

from backend.trtllm_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
