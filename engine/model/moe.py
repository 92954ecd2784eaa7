"""The feed-forward sublayer: gate, routed experts, shared expert.

There are two ways through. Where experts are packed and there are kernels for them, tokens are routed on the device and
each expert is read once, in its four bits, for every TOKENS tokens: of prompts, too, since to dequantise all experts
costs more than to read them several times. Elsewhere torch's operations run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.model.config import DeepSeekV4Config
from engine.model.group import Alone, Group
from engine.model.layers import GatedLinear, Linear, Matrix, Weights, narrow
from kernels.expert_parts import ExpertParts, add_up
from kernels.expert_weights import LANES, ExpertWeights, Format
from kernels.gemm import linear
from kernels.launch_order import Pair
from kernels.moe import expert_scores, experts, route
from kernels.moe_decode import expert_parts, experts_decode
from kernels.moe_gate import route_beside, route_by_gate
from kernels.moe_held import hold_experts
from kernels.moe_routing import Routing, route_tokens
from kernels.ragged import DecodeBatch
from kernels.triton_env import uses_triton

TOKENS = 8192  # in one call of the experts' kernels; of more, a call for each so many
BESIDE = 256  # tokens up to which the shared expert runs beside routing and routed experts; of more, before them


def keeps_packed(device: torch.device) -> bool:
    """Return whether weights stay packed on a device: where decode kernels run."""
    return uses_triton(torch.empty(0, device=device))


class MixtureOfExperts:
    """[T, H] in, [T, H] float32 out. The first layers choose experts by token id, the others by score plus bias.

    Of several ranks each computes its part, and the sum of all is exchanged in x's dtype: as float32 it would cost
    twice as much, and the streams that it is added to are rounded to that dtype in any case.
    """

    def __init__(self, weights: Weights, layer: int, config: DeepSeekV4Config, *, group: Group | None = None) -> None:
        prefix = f"layers.{layer}.ffn"
        self.group = group or Alone()
        self.gate = narrow(weights.pop(f"{prefix}.gate.weight"))
        self.table = weights.pop(f"{prefix}.gate.tid2eid") if config.is_hash_layer(layer) else None
        self.bias = None if config.is_hash_layer(layer) else weights.pop(f"{prefix}.gate.bias")
        self.w13 = _matrices(weights, f"{prefix}.experts.w13")
        self.w2 = _matrices(weights, f"{prefix}.experts.w2")
        shared = f"{prefix}.shared_experts"
        self.shared_w13 = GatedLinear(*(Matrix.take(weights, f"{shared}.{name}") for name in ("w1", "w3")))
        self.shared_w2 = Linear(weights, f"{shared}.w2")
        # Of the experts that there are, those whose matrices this rank has: fewer than all where ranks share them out.
        count = self.w13.experts if isinstance(self.w13, ExpertWeights) else int(self.w13.shape[0])
        self.shares_experts = count < config.n_routed_experts
        first = self.group.index * count if self.shares_experts else 0
        self.held = range(first, first + count)
        self.top_k, self.scaling, self.limit = (
            config.num_experts_per_tok,
            config.routed_scaling_factor,
            config.swiglu_limit,
        )

    @property
    def is_packed(self) -> bool:
        """Both matrices of the routed experts are in four bits: decode kernels read them."""
        return isinstance(self.w13, ExpertWeights) and isinstance(self.w2, ExpertWeights)

    def __call__(self, x: Tensor, token_ids: Tensor, decode: DecodeBatch | None = None) -> Tensor:
        """x [T, H]: normed hidden states.   token_ids [T] int64.   decode: of a step that may have padding tokens."""
        y, is_alone = self._own_parts(x, token_ids, decode), self.group.count == 1
        dtype = torch.float32 if is_alone else x.dtype
        y = add_up(y, out_dtype=dtype) if isinstance(y, ExpertParts) else y.to(dtype)
        return y if is_alone else self.group.all_reduce(y)

    def parts(self, x: Tensor, token_ids: Tensor, decode: DecodeBatch | None = None) -> Tensor | ExpertParts:
        """Return the output as it comes: what packed experts give up to TOKENS tokens is left to the reader to add up.

        The arguments are those of a call. Of several ranks the sums are exchanged, not the parts.
        """
        if self.group.count > 1:
            return self(x, token_ids, decode)
        return self._own_parts(x, token_ids, decode)

    def _own_parts(self, x: Tensor, token_ids: Tensor, decode: DecodeBatch | None) -> Tensor | ExpertParts:
        """Return what this rank's experts, and its slice of the shared one, give."""
        w13, w2, has_kernels = self.w13, self.w2, decode is not None or uses_triton(x)
        if has_kernels and isinstance(w13, ExpertWeights) and isinstance(w2, ExpertWeights):
            sequence = None if decode is None else decode.sequence
            if x.shape[0] <= BESIDE:
                return self._read_once(x, token_ids, sequence, w13, w2)
            shared = self._shared(x, decodes=True)
            found = []
            for first in range(0, x.shape[0], TOKENS):
                at = slice(first, first + TOKENS)
                routing = self._route(x[at], token_ids[at], None if sequence is None else sequence[at])
                found.append(experts_decode(routing, w13, w2, limit=self.limit, add=shared[at]))
            return found[0] if len(found) == 1 else torch.cat(found)
        chosen = None if self.table is None else self.table[token_ids]
        ids, weights = route(
            expert_scores(x, self.gate.float()), bias=self.bias, chosen=chosen, top_k=self.top_k, scaling=self.scaling
        )
        routed = experts(x, self.w13, self.w2, ids, weights, limit=self.limit, first_expert=self.held.start)
        return routed + self._shared(x, decodes=False)

    def _shared(self, x: Tensor, *, decodes: bool) -> Tensor:
        return self.shared_w2(self.shared_w13(x, limit=self.limit, decodes=decodes), decodes=decodes)

    def _read_once(
        self, x: Tensor, token_ids: Tensor, sequence: Tensor | None, w13: ExpertWeights, w2: ExpertWeights
    ) -> ExpertParts:
        """Return what packed experts give to a few tokens, beside the shared expert."""
        shared = self.shared_w13.both.parts
        if self.gate.dtype == torch.bfloat16 and len(shared) == 1 and not self.shares_experts:
            given = self._routed_by(token_ids, sequence)
            routing, opened = route_beside(x, self.gate, *shared[0], limit=self.limit, **given)
            pair = Pair()  # lives until the second is launched
            add = self.shared_w2(opened, decodes=True, order=pair.lead)
            return expert_parts(routing, w13, w2, limit=self.limit, add=add, order=pair.aside)
        add = self._shared(x, decodes=True)
        return expert_parts(self._route(x, token_ids, sequence), w13, w2, limit=self.limit, add=add)

    def _route(self, x: Tensor, token_ids: Tensor, sequence: Tensor | None) -> Routing:
        given = self._routed_by(token_ids, sequence)
        if self.gate.dtype == torch.bfloat16:
            routing = route_by_gate(x, self.gate, **given)
        else:
            routing = route_tokens(x, linear(x.float(), self.gate), **given, is_raw=True)
        return hold_experts(routing, self.held) if self.shares_experts else routing

    def _routed_by(self, token_ids: Tensor, sequence: Tensor | None) -> dict[str, Any]:
        given: dict[str, Any] = {"top_k": self.top_k, "scaling": self.scaling, "sequence": sequence}
        return given | ({"bias": self.bias} if self.table is None else {"table": self.table, "token_ids": token_ids})


def _matrices(weights: Weights, name: str) -> Tensor | ExpertWeights:
    """Take one matrix of all experts, as the loader has left it."""
    if name in weights:
        return weights.pop(name)
    codes, scales, factors = (weights.pop(f"{name}.{field}") for field in ("codes", "scales", "factors"))
    format: Format = "nvfp4" if scales.shape[3] == LANES["nvfp4"] else "mxfp4"
    return ExpertWeights(format, codes, scales, factors)
