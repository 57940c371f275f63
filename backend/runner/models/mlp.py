"""The feed-forward blocks of a layer: one for all tokens, or a mixture of experts."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tritium import kernels
from tritium.backend.runner.models.config import ExpertsConfig, ModelConfig
from tritium.backend.runner.models.linear import Linear
from tritium.backend.runner.models.lora import LoraRows
from tritium.kernels import PackedExperts, PackedWeight


class Mlp:
    """down(act(gate(x)) * up(x)) (Shazeer, 2020), or down(act(up(x)))."""

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        intermediate: int,
        empty: Callable[..., Tensor],
        batch_invariant: bool,
    ) -> None:
        self.activation, self.is_gated = config.activation, config.is_gated
        hidden, names = config.hidden_size, config.names.gate_up
        width = intermediate * (2 if config.is_gated else 1)
        parts = {f"{name}.{part}": width // len(names) for part in names}
        down = {f"{name}.down_proj": hidden}
        bias = config.mlp_bias
        self.gate_up_proj = Linear(hidden, parts, bias, empty, batch_invariant)
        self.down_proj = Linear(intermediate, down, bias, empty, batch_invariant)
        self.linears = (self.gate_up_proj, self.down_proj)

    def __call__(self, x: Tensor, lora: LoraRows | None) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]"""
        x = kernels.activate(self.gate_up_proj(x, lora), self.activation, self.is_gated)
        return self.down_proj(x, lora)

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, tensor) of each weight."""
        for part in self.linears:
            yield from part.targets()

    def pack(self, weight_bits: int, arena: kernels.Arena) -> None:
        for part in self.linears:
            part.pack(weight_bits, arena)


class ExpertsMlp:
    """A mixture of experts (Shazeer et al., 2017): a router chooses a few of them for each token.

    Adapters change only what all tokens use.
    """

    def __init__(
        self,
        config: ModelConfig,
        experts: ExpertsConfig,
        name: str,
        empty: Callable[..., Tensor],
        batch_invariant: bool,
    ) -> None:
        assert config.is_gated
        self.config, self.experts = config, experts
        self.name = f"{name}.{experts.module}"
        self.batch_invariant = batch_invariant
        hidden, size, count = config.hidden_size, experts.intermediate_size, experts.num_experts
        self.router: Tensor | PackedWeight = empty(count, hidden)
        self.gate_up: Tensor | PackedExperts = empty(count, 2 * size, hidden)
        self.down: Tensor | PackedExperts = empty(count, hidden, size)
        self.shared: Mlp | None = None
        self.shared_gate: Tensor | PackedWeight | None = None
        self.linears: tuple[Linear, ...] = ()
        if experts.shared_size:
            shared = f"{self.name}.shared_expert"
            self.shared = Mlp(config, shared, experts.shared_size, empty, batch_invariant)
            self.shared_gate = empty(1, hidden)
            self.linears = self.shared.linears

    def __call__(self, x: Tensor, lora: LoraRows | None) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]"""
        experts = self.experts
        logits = self._linear(x, self.router)
        probs, expert_ids = logits.softmax(dim=-1).topk(experts.num_per_token, dim=-1)
        if experts.is_normalised:
            probs /= probs.sum(dim=-1, keepdim=True)
        out = kernels.experts(
            x,
            expert_ids,
            probs,
            self.gate_up,
            self.down,
            self.config.activation,
            self.batch_invariant,
        )
        if self.shared is None or self.shared_gate is None:
            return out
        gate = self._linear(x, self.shared_gate).sigmoid()  # [num_tokens, 1]
        return out + (self.shared(x, lora) * gate).to(x.dtype)

    def _linear(self, x: Tensor, weight: Tensor | PackedWeight) -> Tensor:
        """[num_tokens, out_features] float32"""
        invariant = self.batch_invariant
        return kernels.linear(x, weight, dtype=torch.float32, batch_invariant=invariant)

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        """(name in transformers, tensor) of each weight."""
        assert isinstance(self.router, Tensor), "packed"
        assert isinstance(self.gate_up, Tensor), "packed"
        assert isinstance(self.down, Tensor), "packed"
        yield f"{self.name}.gate.weight", self.router
        gate_name, up_name, down_name = self.experts.names
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            expert = f"{self.name}.experts.{i}"
            yield f"{expert}.{gate_name}.weight", gate
            yield f"{expert}.{up_name}.weight", up
            yield f"{expert}.{down_name}.weight", down
        if self.shared is not None:
            yield from self.shared.targets()
            assert isinstance(self.shared_gate, Tensor), "packed"
            yield f"{self.name}.shared_expert_gate.weight", self.shared_gate

    def pack(self, weight_bits: int, arena: kernels.Arena) -> None:
        assert isinstance(self.router, Tensor), "packed before"
        assert isinstance(self.gate_up, Tensor), "packed before"
        assert isinstance(self.down, Tensor), "packed before"
        self.router = kernels.pack_linear(self.router, arena=arena)
        self.gate_up = kernels.pack_experts(self.gate_up, weight_bits, arena)
        self.down = kernels.pack_experts(self.down, weight_bits, arena)
        if self.shared is not None:
            self.shared.pack(weight_bits, arena)
            assert isinstance(self.shared_gate, Tensor), "packed before"
            self.shared_gate = kernels.pack_linear(self.shared_gate, arena=arena)
