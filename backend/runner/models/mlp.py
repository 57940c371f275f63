"""The feed-forward blocks of a layer: one for all tokens, or a mixture of experts."""

from functools import partial

import torch
from torch import Tensor

from tritium import kernels
from tritium.backend.runner.models.config import ExpertsConfig, ModelConfig
from tritium.backend.runner.models.linear import Linear, Slot, Slots, join
from tritium.backend.runner.models.lora import LoraRows
from tritium.kernels import PackedExperts, PackedLinear, StoredWeight


class Mlp:
    """down(act(gate(x)) * up(x)) (Shazeer, 2020), or down(act(up(x)))."""

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        intermediate: int,
        like: Tensor,
        batch_invariant: bool,
    ) -> None:
        self.activation, self.is_gated = config.activation, config.is_gated
        hidden, names = config.hidden_size, config.names.gate_up
        width = intermediate * (2 if config.is_gated else 1)
        parts = {f"{name}.{part}": width // len(names) for part in names}
        down = {f"{name}.down_proj": hidden}
        bias = config.mlp_bias
        self.gate_up_proj = Linear(hidden, parts, bias, like, batch_invariant)
        self.down_proj = Linear(intermediate, down, bias, like, batch_invariant)
        self.linears = (self.gate_up_proj, self.down_proj)

    def __call__(self, x: Tensor, lora: LoraRows | None) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]"""
        x = kernels.activate(self.gate_up_proj(x, lora), self.activation, self.is_gated)
        return self.down_proj(x, lora)

    def slots(self) -> Slots:
        for part in self.linears:
            yield from part.slots()

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
        like: Tensor,
        batch_invariant: bool,
    ) -> None:
        assert config.is_gated
        self.config, self.experts = config, experts
        self.name = f"{name}.{experts.module}"
        self.batch_invariant = batch_invariant
        hidden, count = config.hidden_size, experts.num_experts
        # From `pack` on; the routers are packed as well.
        self.gate_up: PackedExperts
        self.down: PackedExperts
        self.router: PackedLinear = like.new_empty(count, hidden)
        self.shared: Mlp | None = None
        self.shared_gate: PackedLinear | None = None
        self._like = like
        self._stored: dict[str, StoredWeight] = {}  # until they are packed
        self.linears: tuple[Linear, ...] = ()
        if experts.shared_size:
            shared = f"{self.name}.shared_expert"
            self.shared = Mlp(config, shared, experts.shared_size, like, batch_invariant)
            self.shared_gate = like.new_empty(1, hidden)
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

    def _linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """[num_tokens, out_features] float32"""
        invariant = self.batch_invariant
        return kernels.linear(x, weight, dtype=torch.float32, batch_invariant=invariant)

    def slots(self) -> Slots:
        assert isinstance(self.router, Tensor), "packed"
        yield f"{self.name}.gate.weight", Slot.of(self.router)
        hidden, size = self.config.hidden_size, self.experts.intermediate_size
        shapes = (torch.Size((size, hidden)),) * 2 + (torch.Size((hidden, size)),)
        for names in self._expert_names():
            for name, shape in zip(names, shapes, strict=True):
                yield name, Slot(shape, partial(self._store, name))
        if self.shared is not None:
            yield from self.shared.slots()
            assert isinstance(self.shared_gate, Tensor), "packed"
            yield f"{self.name}.shared_expert_gate.weight", Slot.of(self.shared_gate)

    def pack(self, weight_bits: int, arena: kernels.Arena) -> None:
        """Lay out the weights, all of which are stored."""
        assert isinstance(self.router, Tensor), "packed before"
        self.router = kernels.pack_linear(self.router, arena=arena)
        gate_ups, downs = [], []
        for *gate_up, down in self._expert_names():
            gate_ups.append(join([self._stored.pop(name) for name in gate_up]))
            downs.append(self._stored.pop(down))
        self.gate_up = kernels.pack_experts(join(gate_ups, torch.stack), weight_bits, arena)
        self.down = kernels.pack_experts(join(downs, torch.stack), weight_bits, arena)
        if self.shared is not None:
            self.shared.pack(weight_bits, arena)
            assert isinstance(self.shared_gate, Tensor), "packed before"
            self.shared_gate = kernels.pack_linear(self.shared_gate, arena=arena)

    def _expert_names(self) -> list[tuple[str, ...]]:
        """The names of each expert's weights: gate, up, down."""
        return [
            tuple(f"{self.name}.experts.{i}.{name}.weight" for name in self.experts.names)
            for i in range(self.experts.num_experts)
        ]

    def _store(self, name: str, weight: StoredWeight) -> None:
        self._stored[name] = weight.to(self._like)
