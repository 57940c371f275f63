"""Tritium as a python-based backend of Triton Server.

Installed as `<backend directory>/tritium`, it lets a model folder do without a model.py: its
config.pbtxt says `backend: "tritium"`.
"""

from tritium.backend.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
