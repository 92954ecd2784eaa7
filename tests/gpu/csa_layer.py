"""A CSA layer's decode step costs what its context costs, whatever context is allowed: the engine's own layer, timed.

    PYTHONPATH=. python tests/gpu/csa_layer.py [--json FILE]      from the repository's root; exit code 1 beyond 5 %

The attention sublayer of one rank of four (16 heads, all of the indexer), 64 sequences of 8,192 tokens, as a replayed
CUDA graph: linears, compressors, cache write, indexer, attention. Only the block table's width differs: room for 16k
tokens a sequence, and for 1M. Outputs must be equal bit for bit. The memory plan of a cache of fixed size is compared
beside it, and the scores' scratch memory, the one buffer that knows the maximum.
Under TRITON_INTERPRET=1 with --device cpu --small it tries itself out, without times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from engine.cache import KVCache
from engine.model.attention import Attention
from engine.model.config import DeepSeekV4Config, parse_config
from engine.model.layers import Rotary
from engine.model.layout import build_layout
from kernels.gpu_timer import graph_timer, warm_clocks
from kernels.indexer_decode import WORKSPACE_SCORES
from kernels.ragged import RaggedBatch

BLOCK_TOKENS = 256
SIZES = {"hidden_size": 4096, "q_lora_rank": 1024, "num_attention_heads": 16, "o_groups": 2, "o_lora_rank": 1024}
SMALL = {"hidden_size": 128, "q_lora_rank": 128, "num_attention_heads": 2, "o_groups": 1, "o_lora_rank": 64}
MAXIMA = (1 << 14, 1 << 20)


def make_config(sizes: dict[str, int]) -> DeepSeekV4Config:
    """Return the config of one CSA layer of V4-Flash's head geometry."""
    raw = json.loads((Path(__file__).resolve().parent.parent / "oracle/geo/config.json").read_text())
    one = {"num_hidden_layers": 1, "compress_ratios": [4], "max_position_embeddings": 1 << 20}
    return parse_config(raw | sizes | one)


def draw_weights(config: DeepSeekV4Config, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the layer's weights by official name: bf16 where a checkpoint has bf16, e4m3 with scales where it has
    e4m3."""
    draw = torch.Generator(device).manual_seed(0)
    hidden, latent, dim = config.hidden_size, config.q_lora_rank, config.head_dim
    index_heads, index_dim = config.index_n_heads, config.index_head_dim
    found: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, channels: int, *, packed: bool = True) -> None:
        w = torch.randn(rows, channels, generator=draw, device=device) * channels**-0.5
        if packed:
            found[f"{name}.weight"] = (w * 64).to(torch.float8_e4m3fn)
            found[f"{name}.scale"] = torch.full((-(-rows // 128), -(-channels // 128)), 2.0**-6, device=device)
        else:
            found[f"{name}.weight"] = w

    for name, rows, channels in (
        ("wq_a", latent, hidden), ("wkv", dim, hidden), ("wq_b", config.num_attention_heads * dim, latent),
        ("wo_a", config.o_groups * config.o_lora_rank, config.num_attention_heads * dim // config.o_groups),
        ("wo_b", hidden, config.o_groups * config.o_lora_rank), ("indexer.wq_b", index_heads * index_dim, latent),
    ):  # fmt: skip
        matrix(name, rows, channels)
    matrix("indexer.weights_proj", index_heads, hidden, packed=False)
    found["indexer.weights_proj.weight"] = found["indexer.weights_proj.weight"].to(torch.bfloat16)
    for prefix, width in (("compressor", dim), ("indexer.compressor", index_dim)):
        for name in ("wkv", "wgate"):
            matrix(f"{prefix}.{name}", 2 * width, hidden, packed=False)
        found[f"{prefix}.ape"] = torch.zeros(4, 2 * width, device=device)
        found[f"{prefix}.norm.weight"] = torch.ones(width, device=device)
    found["attn_sink"] = torch.zeros(config.num_attention_heads, device=device)
    for name, width in (("q_norm", latent), ("kv_norm", dim)):
        found[f"{name}.weight"] = torch.ones(width, device=device)
    return {f"layers.0.attn.{name}": w for name, w in found.items()}


def main() -> int:
    """Print the table; return 1 if the maximum shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="two sequences of 2,300 tokens, few channels, no times")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    device = torch.device(args.device)
    count, context = (2, 2300) if args.small else (64, 8192)
    config = make_config(SMALL if args.small else SIZES)
    layout = build_layout(config, block_tokens=BLOCK_TOKENS, kv_cache_dtype="packed", index_cache_dtype="fp8")
    held = -(-context // BLOCK_TOKENS)
    cache = KVCache(layout, count * held, count, device)
    _fill(cache)
    layer = Attention(draw_weights(config, device), 0, config, use_hadamard=False)
    rotary = Rotary(config, device)
    order = torch.randperm(count * held, generator=torch.Generator().manual_seed(0)).view(count, held).tolist()
    dtype = torch.float32 if args.small else torch.bfloat16
    x = torch.randn(count, config.hidden_size, device=device).to(dtype)
    results, outs = [], []
    for most in MAXIMA:
        columns = most // BLOCK_TOKENS
        tables = [[*blocks, *[-1] * (columns - held)] for blocks in order]
        batch = RaggedBatch.build(
            [(context - 1, 1)] * count, slots=range(count), block_tables=tables, device=device
        )  # fmt: skip
        rotations = rotary.of_tokens(batch.positions)
        decode = batch.decode

        def step(batch=batch, decode=decode, rotations=rotations) -> torch.Tensor:
            return layer(x, batch, decode, rotations, cache)

        outs.append(step())
        scratch = 4 * min(count * columns * BLOCK_TOKENS // 4 + count * 64, WORKSPACE_SCORES)
        results.append({"maximum": most, "us": _time(step) if args.device == "cuda" else None, "scratch": scratch})
    same = torch.equal(*outs) and bool(outs[0].isfinite().all())
    plan = cache.num_bytes
    for row in results:
        us = "" if row["us"] is None else f"{row['us']:8.1f} us"
        share = row["scratch"] / 80e9
        print(f"at most {row['maximum']:>9,} tokens: {us}  scores' scratch {row['scratch'] / 2**20:5.1f} MiB, "
              f"{share:.3%} of a card; cache of {plan / 2**20:,.1f} MiB")  # fmt: skip
    print(f"outputs equal bit for bit and finite: {same}")
    fault = not same
    if args.device == "cuda":
        apart = results[1]["us"] / results[0]["us"] - 1
        print(f"time with 1M allowed over time with 16k: {1 + apart:.3f}")
        fault |= abs(apart) > 0.05
    if args.json:
        args.json.write_text(json.dumps({"layer": SIZES, "sequences": count, "context": context, "rows": results}))
    return int(fault)


def _fill(cache: KVCache) -> None:
    """Write random rows everywhere: what a context of random tokens would have left."""
    draw = torch.Generator(cache.device).manual_seed(1)
    for region in ("window", "csa_kv", "csa_index", "csa_state", "index_state"):
        rows = cache.rows(region, 0)
        place = torch.arange(rows.num_units * rows.rows, device=cache.device)
        for some in place.split(1 << 15):
            x = torch.randn(some.shape[0], rows.width, generator=draw, device=cache.device)
            rows.write(some // rows.rows, some % rows.rows, x)


def _time(step) -> float:
    """Return the microseconds of one step among replayed ones."""
    warm_clocks(torch.device("cuda"))
    return statistics.median(graph_timer([step], replays=30))


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
