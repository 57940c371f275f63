"""TensorRT-LLM's contract: requests for its `ensemble` model, translated for the main model.

Names, types, shapes and meanings are those of TensorRT-LLM's Triton Server backend. Works on numpy
arrays. Knows nothing of allowed values: the main model checks them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritium.backend.errors import InvalidArgument, Unsupported

# Inputs that are sampling parameters: (name, type, dims, vLLM's name). If a request has two inputs
# with the same vLLM name, the later one counts.
_SAMPLING_INPUTS = (
    ("max_tokens", "TYPE_INT32", [1], "max_tokens"),
    ("stop_words", "TYPE_STRING", [-1], "stop"),
    ("bad_words", "TYPE_STRING", [-1], "bad_words"),
    ("top_k", "TYPE_INT32", [1], "top_k"),
    ("top_p", "TYPE_FP32", [1], "top_p"),
    ("temperature", "TYPE_FP32", [1], "temperature"),
    ("repetition_penalty", "TYPE_FP32", [1], "repetition_penalty"),
    ("presence_penalty", "TYPE_FP32", [1], "presence_penalty"),
    ("frequency_penalty", "TYPE_FP32", [1], "frequency_penalty"),
    ("min_tokens", "TYPE_INT32", [1], "min_tokens"),
    ("min_length", "TYPE_INT32", [1], "min_tokens"),  # the older name of min_tokens
    ("random_seed", "TYPE_UINT64", [1], "seed"),  # the older name of seed
    ("seed", "TYPE_UINT64", [1], "seed"),
)
# (name, type, dims): all inputs are optional; each has a leading batch dimension of 1.
INPUTS = (
    ("text_input", "TYPE_STRING", [1]),
    *((name, data_type, dims) for name, data_type, dims, _ in _SAMPLING_INPUTS),
    ("end_id", "TYPE_INT32", [1]),
    ("pad_id", "TYPE_INT32", [1]),  # has no effect: nothing is padded
    ("length_penalty", "TYPE_FP32", [1]),  # has no effect: belongs to beam search
    ("beam_width", "TYPE_INT32", [1]),
    ("num_return_sequences", "TYPE_INT32", [1]),
    ("stream", "TYPE_BOOL", [1]),
    ("exclude_input_in_output", "TYPE_BOOL", [1]),
    ("return_log_probs", "TYPE_BOOL", [1]),
    ("return_num_input_tokens", "TYPE_BOOL", [1]),
    ("return_num_output_tokens", "TYPE_BOOL", [1]),
    ("return_context_logits", "TYPE_BOOL", [1]),
    ("return_generation_logits", "TYPE_BOOL", [1]),
    ("return_perf_metrics", "TYPE_BOOL", [1]),
    ("embedding_bias_words", "TYPE_STRING", [-1]),
    ("embedding_bias_weights", "TYPE_FP32", [-1]),
    ("guided_decoding_guide_type", "TYPE_STRING", [1]),
    ("guided_decoding_guide", "TYPE_STRING", [1]),
    ("return_error_code", "TYPE_BOOL", [1]),  # ours, as in the main model's contract
)
OUTPUTS = (
    ("text_output", "TYPE_STRING", [-1]),
    ("cum_log_probs", "TYPE_FP32", [-1]),
    ("output_log_probs", "TYPE_FP32", [-1, -1]),
    ("num_input_tokens", "TYPE_INT32", [1]),
    ("num_output_tokens", "TYPE_INT32", [1]),
)

_WORDS = ("stop_words", "bad_words")
_GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
_COUNTS = ("num_input_tokens", "num_output_tokens")
_LABELS = ("business_line", "cache_salt", "request_class")
_ONLY_ONE = ("beam_width", "num_return_sequences")
_NEVER = (
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
    "embedding_bias_words",
    "embedding_bias_weights",
)
# Larger than any vocabulary. Clients send it as end_id for "none" (SGLang's bench_serving does).
_NO_END_ID = 2**20


@dataclass(frozen=True, slots=True)
class Translation:
    """A request for the main model, and what is needed to translate its response."""

    inputs: dict[str, NDArray[Any]]
    outputs: list[str]  # the outputs to request from the main model
    names: dict[str, str]  # vLLM's name -> the client's, where they differ

    def with_own_names(self, message: str) -> str:
        """The main model's message, with the client's names for the parameters."""
        for theirs, ours in self.names.items():
            message = message.replace(f"'{theirs}'", f"'{ours}'")
        return message


def translate(inputs: Mapping[str, NDArray[Any]], parameters: str) -> Translation:
    """Read a request.

    Args:
        inputs: The request's tensors.
        parameters: The request's parameters, a JSON object or "": labels such as business_line, and
            sampling parameters for which TensorRT-LLM has no tensor.

    Raises:
        InvalidArgument, Unsupported: names the tensor.
    """
    for name in _NEVER:
        if name in inputs and inputs[name].any():
            raise Unsupported(f"{name}: not supported by this model")
    for name in _ONLY_ONE:
        if name in inputs and (value := _number(inputs, name)) != 1:
            raise Unsupported(f"{name}: {value} is not supported; only 1 is")
    settings = json.loads(parameters) if parameters else {}
    if str(settings.pop("n", 1)) != "1":
        raise Unsupported("n: not supported by this model; only 1 is")
    labels = {name: str(settings.pop(name)) for name in _LABELS if name in settings}
    # A parameter of TensorRT-LLM's backend. Clients expect deltas even if they send true.
    settings.pop("accumulate_tokens", None)
    sampling, names = _sampling(inputs, settings)
    stream = _flag(inputs, "stream")
    wanted = ["finish_reason"]
    wanted += [name for name in _COUNTS if _flag(inputs, f"return_{name}")]
    if _flag(inputs, "return_log_probs"):
        wanted += ["logprobs", "cumulative_logprob"]
    flags = {f"return_{name}": True for name in wanted} | {"stream": stream}
    if not stream:  # a stream never repeats the input
        flags["exclude_input_in_output"] = _flag(inputs, "exclude_input_in_output")
    strings = labels | {"sampling_parameters": json.dumps(sampling)}
    tensors = {name: np.array([flag]) for name, flag in flags.items()}
    tensors |= {name: np.array([text], dtype=np.object_) for name, text in strings.items()}
    if "text_input" in inputs:
        tensors["text_input"] = inputs["text_input"].reshape(-1)
    return Translation(tensors, ["text_output", *wanted], names)


def wants_error_code(inputs: Mapping[str, NDArray[Any]]) -> bool:
    """Whether error messages start with the gRPC status, as in "UNAVAILABLE: ..."."""
    return _flag(inputs, "return_error_code")


def response_tensors(outputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The output tensors of one response, from those of the main model's."""
    tensors = {"text_output": outputs["text_output"]}
    if "logprobs" in outputs:
        # One object per token, which has only the chosen token.
        tokens = json.loads(outputs["logprobs"].item())
        logprobs = [token["logprob"] for chosen in tokens for token in chosen.values()]
        tensors["output_log_probs"] = np.array([[logprobs]], dtype=np.float32)  # [1, beams, tokens]
        tensors["cum_log_probs"] = outputs["cumulative_logprob"].reshape(1, 1)
    for name in _COUNTS:
        if name in outputs:
            tensors[name] = outputs[name].astype(np.int32).reshape(1, 1)
    return tensors


def _sampling(
    inputs: Mapping[str, NDArray[Any]], settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Sampling parameters by vLLM's names, and vLLM's name -> the client's where they differ."""
    sampling, names = dict(settings), {}
    for ours, _, _, theirs in _SAMPLING_INPUTS:
        if ours in inputs:
            value = _strings(inputs, ours) if ours in _WORDS else _number(inputs, ours)
            if value != []:
                sampling[theirs] = value
            if ours != theirs:
                names[theirs] = ours
    # TensorRT-LLM's default for both is 0, which is greedy, whatever the temperature.
    if not sampling.get("top_p"):
        sampling.pop("top_p", None)
        if not sampling.get("top_k"):
            sampling["temperature"] = 0
    if "end_id" in inputs:  # replaces EOS
        sampling["ignore_eos"] = True
        if 0 <= (end_id := _number(inputs, "end_id")) < _NO_END_ID:
            sampling["stop_token_ids"] = [end_id]
            names["stop_token_ids"] = "end_id"
    if _flag(inputs, "return_log_probs"):
        sampling["logprobs"] = 0
    if "guided_decoding_guide_type" in inputs:
        sampling["structured_outputs"] = _guide(inputs)
        names["structured_outputs"] = "guided_decoding_guide"
    return sampling, names


def _guide(inputs: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    kind = "".join(_strings(inputs, "guided_decoding_guide_type"))
    if kind == "json":
        return {"json_object": True}
    if kind not in _GUIDES:
        raise InvalidArgument(
            f"guided_decoding_guide_type: {kind!r:.100} is not allowed; it is json or "
            f"{', '.join(_GUIDES)}"
        )
    if "guided_decoding_guide" not in inputs:
        raise InvalidArgument(f"guided_decoding_guide: is missing; {kind} needs it")
    return {_GUIDES[kind]: "".join(_strings(inputs, "guided_decoding_guide"))}


def _number(inputs: Mapping[str, NDArray[Any]], name: str) -> Any:
    value = inputs[name].reshape(-1)[0]
    # By the shortest decimal, so that 0.95 in FP32 becomes 0.95 and not 0.949999988079071.
    return float(str(value)) if isinstance(value, np.floating) else value.item()


def _flag(inputs: Mapping[str, NDArray[Any]], name: str) -> bool:
    return name in inputs and bool(inputs[name].any())


def _strings(inputs: Mapping[str, NDArray[Any]], name: str) -> list[str]:
    """The non-empty strings; clients send an empty one for "none"."""
    try:
        return [value.decode() for value in inputs[name].reshape(-1) if value]
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{name}: not valid UTF-8 at byte {error.start}; only UTF-8 text is allowed"
        ) from None
