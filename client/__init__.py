"""The Python client of a Tritium server, over gRPC or HTTP, and its command line."""

from tritium.client.base import Client, GenerationStream
from tritium.client.grpc_client import GrpcClient
from tritium.client.http_client import HttpClient
from tritium.client.types import ConnectionLost, Delta, Generation, GenerationError, Usage

__all__ = [
    "Client",
    "ConnectionLost",
    "Delta",
    "Generation",
    "GenerationError",
    "GenerationStream",
    "GrpcClient",
    "HttpClient",
    "Usage",
]
