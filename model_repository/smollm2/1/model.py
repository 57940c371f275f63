"""The file that Triton Server loads; the code is in the package `tritium.backend`."""

from tritium.backend.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
