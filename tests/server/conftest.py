"""One Triton Server for all server tests, with two models: one with room and a cramped one."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tritium.backend.host.serve import TritonServer
from tritium.kernels import cpu
from tritium.loadtests.harness import Server, complete, free_ports, until, write_model

# dtype auto is bfloat16 if the C kernels are available, else float32. With both, the greedy text of
# a prompt is the same alone and in any batch.
KV_BYTES = 23040 if cpu.is_available() else 46080  # per token

# Limits that tests can reach: 2 sequences run, 4 wait, and the KV cache holds 512 tokens.
CRAMPED = {
    "max_num_seqs": 2,
    "max_queue_size": 4,
    "max_num_batched_tokens": 64,
    "max_output_tokens": 240,
    "kv_cache_memory": 512 * KV_BYTES,
    "prefix_cache": "off",  # with it, equal prompts would share blocks and all would fit
}

TEMPLATE_WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)


def pytest_collection_modifyitems(items):
    """Mark every test of this folder with `server`."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def tiny_weights(tokenizer, tmp_path_factory):
    """A tiny, fast model with SmolLM2's tokenizer and a chat template that supports tools."""
    directory = tmp_path_factory.mktemp("tiny_weights")
    (directory / "tokenizer.json").write_text(tokenizer.to_json())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE_WITH_TOOLS)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=8192,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    repository = tmp_path_factory.mktemp("model_repository")
    write_model(repository, "smollm2", kv_cache_memory="1GiB")
    write_model(repository, "cramped", **CRAMPED)
    return repository


@pytest.fixture(scope="session")
def server(repository, tmp_path_factory):
    """The running server. It loads models on demand, so tests can add their own."""
    http, grpc, metrics = free_ports(3)
    log = tmp_path_factory.mktemp("log") / "server.log"
    with (
        log.open("wb") as output,
        TritonServer(
            repository,
            http,
            grpc,
            metrics,
            arguments=[
                "--model-control-mode=explicit",
                "--load-model=smollm2",
                "--load-model=cramped",
                "--metrics-interval-ms=50",
            ],
            log=output,
        ) as running,
    ):
        yield Server(
            f"http://localhost:{http}",
            f"localhost:{grpc}",
            f"http://localhost:{metrics}",
            log,
            running.process.pid,
        )


IDLE_GAUGE = re.compile(
    r"tritium:(?:kv_blocks_used|requests_running|requests_waiting)"
    r'\{.*model="(?:smollm2|cramped)".*\} 0(?:\.0*)?'
)


@pytest.fixture(autouse=True)
def server_stays_usable(server):
    """After each test, both models must be idle, hold no KV blocks, and answer."""
    yield
    until(lambda: sum(map(bool, map(IDLE_GAUGE.fullmatch, server.metrics()))) == 2 * 3)
    for model in ("smollm2", "cramped"):
        one_token = {"temperature": 0, "max_tokens": 1}
        assert complete(server, "The capital of France is", model=model, sampling=one_token)
