"""Steps through a gate, for the interpreter and for a GPU, and what routing is right but for float near ties."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels.moe import gated
from kernels.moe_gate import route_beside, route_by_gate
from kernels.moe_routing import Routing, route_tokens_reference
from kernels.quant import dequantize_block_fp8
from kernels.tiles import Tile

# How far two choices (activation plus bias) may lie apart that change places: products are summed in another order.
NEAR = 1e-5


@dataclasses.dataclass
class Case:
    """route_by_gate(x, gate, **routing)."""

    x: torch.Tensor
    gate: torch.Tensor
    routing: dict

    def run(self, **options) -> Routing:
        return route_by_gate(self.x, self.gate, **self.routing, **options)

    def fault(self, **options) -> str:
        """Return what is wrong with what the kernel gives, "" if nothing: its choice, then all that follows from it."""
        return self.fault_of(self.run(**options))

    def beside_fault(self, rows: int) -> str:
        """Return the same where a layer of `rows` gates and values shares the launch, and what is wrong with that."""
        draw = torch.Generator(self.x.device).manual_seed(rows)
        hidden = self.x.shape[1]
        weight = torch.randn(rows, hidden, generator=draw, device=self.x.device).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-rows // 128), -(-hidden // 128), generator=draw, device=self.x.device) / hidden**0.5
        routing, out = route_beside(self.x, self.gate, weight, scale, limit=1.0, **self.routing)
        sums = self.x.double() @ dequantize_block_fp8(weight, scale).double().T
        wanted = gated(*sums.chunk(2, 1), limit=1.0)
        if not torch.allclose(out.double(), wanted, rtol=2**-7, atol=2**-8, equal_nan=True):
            return f"the layer is {(out - wanted).abs().nan_to_num().max():.2e} off"
        return self.fault_of(routing)

    def fault_of(self, got: Routing) -> str:
        """Return what is wrong with a routing, "" if nothing."""
        u = self.x.double() @ self.gate.double().T
        real = torch.ones(len(u), dtype=torch.bool, device=u.device)
        if self.routing.get("sequence") is not None:
            real = self.routing["sequence"] >= 0
        top_k = self.routing["top_k"]
        given = {}
        if self.routing.get("table") is not None:
            given["table"] = self.routing["table"]
            given["token_ids"] = torch.where(real, self.routing["token_ids"], 0)
        else:
            choice = F.softplus(u).sqrt()
            if self.routing.get("bias") is not None:
                choice = choice + self.routing["bias"].double()
            wanted = choice.topk(top_k).values[real]
            ids = got.ids[real].long()
            if not bool(((ids >= 0) & (ids < u.shape[1])).all()):
                return f"ids {got.ids.tolist()}"[:400]
            if bool((ids.sort(1).values.diff(dim=1) == 0).any()):
                return f"an expert is chosen twice: {ids.tolist()}"[:400]
            gap = (choice[real].gather(1, ids) - wanted).abs().max() if len(ids) else 0.0
            if not gap <= NEAR:
                return f"a choice is {gap:.2e} from what should be there: {got.ids.tolist()}"[:400]
            given = {
                "table": got.ids.long().clamp(min=0),
                "token_ids": torch.arange(len(u), device=u.device),
            }
        expected = route_tokens_reference(
            self.x, u.float(), top_k=top_k, scaling=self.routing["scaling"], sequence=self.routing.get("sequence"),
            is_raw=True, **given,
        )  # fmt: skip
        return str(_routing_fault(got, expected))


def make_case(
    tokens: int,
    *,
    experts: int = 20,
    top_k: int = 3,
    hidden: int = 128,
    by_table: bool = False,
    bias: bool = True,
    padding: int = 0,
    same: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Return a step of `tokens` tokens and then `padding` ones, whose x is NaN; same: all take the same experts."""
    draw = torch.Generator(device).manual_seed(seed)
    total = tokens + padding
    x = torch.randn(total, hidden, generator=draw, device=device)
    gate = torch.randn(experts, hidden, generator=draw, device=device) * (2 / hidden**0.5)
    if same:
        x[1:] = x[:1] + 0.01 * x[1:]
    x[tokens:] = torch.nan
    routing: dict = {"top_k": top_k, "scaling": 1.5}
    if by_table:
        noise = torch.rand(50, experts, generator=draw, device=device)
        routing["table"] = noise.topk(top_k).indices.contiguous()
        routing["token_ids"] = torch.randint(0, 50, (total,), generator=draw, device=device)
    elif bias:
        routing["bias"] = torch.randn(experts, generator=draw, device=device) * 0.3
    if padding:
        routing["sequence"] = torch.arange(total, device=device).to(torch.int32)
        routing["sequence"][tokens:] = -1
        if by_table:
            routing["token_ids"][tokens:] = 10**9
    return Case(x.to(dtype), gate.to(torch.bfloat16), routing)


def make_tile(ks=1, split=1, nb=1, converted=256) -> Tile:
    """Return a tile; moe_gate._constants says what the constants mean."""
    return Tile({"KS": ks, "SPLIT": split, "NB": nb, "CONVERTED": converted}, num_warps=ks)


def _routing_fault(got: Routing, wanted: Routing) -> str:
    name = "moe_cases"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].routing_fault(got, wanted)
