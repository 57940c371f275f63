"""Tritium as a Python-based backend of Triton Server.

Installed as `<backend directory>/tritium`. A model folder whose config.pbtxt has the line
`backend: "tritium"` then needs no model.py.
"""

from tritium.backend.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
