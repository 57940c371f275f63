"""What Triton Server loads; everything is in `backend`."""

from tritium.backend.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
