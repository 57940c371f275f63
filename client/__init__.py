"""The Python client of a Tritium server, over gRPC or HTTP, and its command line."""

from client.base import Client, GenerationStream
from client.grpc_client import GrpcClient
from client.http_client import HttpClient
from client.types import ConnectionLost, Delta, Generation, GenerationError, Usage

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
