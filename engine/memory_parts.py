"""What a rank's memory goes to besides the cache: each part in bytes, with its arithmetic, before it is allocated.

Weights and pools are exact. Workspace is an upper bound by the operations of one layer (one layer's tensors make room
for the next one's). What CUDA, its libraries, graphs and the allocator take are constants, which a start puts right.
On the CPU only weights and cache are counted: the host's memory is nobody's to plan. No torch here.
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.graph_sizes import CHUNK_CONTEXT, chunk_sizes, graph_sizes
from engine.model.config import CSA_RATIO, DeepSeekV4Config
from engine.model.shard import Shard
from engine.model.weight_bytes import count_weights
from engine.served_model import shard_of
from kernels.table import counted
from kv_transfer.layout import KVLayout
from router.protocol import MemoryPart

MIB, GIB = 2**20, 2**30

# The constants are of one H200 with 5 and with 11 graphs of 696 nodes (docs/results/memory_plan_h200.json).
# CUDA's context, code of kernels, workspaces of libraries: 621 MiB at the end of a start, and room for what was not
# there: a transport's libraries, code that is loaded later.
CONTEXT_BYTES = 725 * MIB
# Captures took 80 and 98 MiB beyond the allocator: 64 whatever their number, and a node's share.
CAPTURE_BYTES = 64 * MIB
NODE_BYTES = 9 << 9
NODES_OF_LAYER, NODES_OF_STEP = 16, 12
# Of chunks of prompts 11 graphs of 757 to 1,357 nodes took 174 MiB.
NODES_OF_CHUNK_LAYER, CHUNK_NODE_BYTES = 31, 16 << 9
# The allocator held up to 98 MiB more than is counted here as workspace and sampling, unused in its blocks, and 33 more
# than weights have (rounding).
ALLOCATOR_BYTES = 136 * MIB
# Never given away: what a driver takes later.
MARGIN_BYTES = GIB // 2

# Two communicators of NCCL: an assumption, nobody has measured them on PCIe.
COMMUNICATORS_BYTES = 512 * MIB

# As in engine.cache, kernels.one_shot, engine.model, kv_transfer.checksum, kernels.indexer_decode, indexer_chunk,
# moe_routing and moe_blocks, which import torch.
SCRATCH_BYTES = 16 * MIB
ONE_SHOT_BYTES = MIB // 2
WORKSPACE_SCORES = 1 << 24
CHUNK_SCORES = 1 << 26
EXPERTS_TOKENS = 256
EXPERTS_PARTS = 192 * MIB
MOST_TOKENS = 8192  # of a step, whatever its sequences: what kernels for packed rows are made for
CHECKSUM_BYTES = 32 * MIB

# Of each of a token's query channels, the operations for prompts hold 19 bytes at once (counted on the CPU, with
# V4-Flash's heads on one rank and on four), and tiles of keys beside them.
_PROMPT_BYTES_OF_CHANNEL = 19
_PROMPT_TILES = 96 * MIB
# Of a token's hidden channels, partial sums of a hyper-connection hold 8 bytes.
_MIX_BYTES_OF_CHANNEL = 8
# Of a logit, sampling by torch's operations holds about ten words at once: copies, an order, sums.
_TORCH_SAMPLING_WORDS = 10
# Of a logit, sampling by kernels makes room for a value and an id in two lists.
_SAMPLING_LISTS = 4


def fixed_parts(config: EngineConfig, model: DeepSeekV4Config, layout: KVLayout) -> list[MemoryPart]:
    """Return what is needed before the first slot and block, largest first. Raises ValueError for an impossible cut."""
    weights = _weights(config, model)
    if config.device == "cpu":
        return [weights]
    shard = shard_of(config, model)
    local = shard.of(model)
    parts = [weights, _scratch(), _context(), _allocator()]
    parts += [_graphs(config, local)]
    if config.role == "decode":
        parts += [_decode_workspace(config, local, layout), _sampling_pools(config, local)]
    else:
        parts += [_prefill_workspace(config, local, layout)]
    if config.ranks > 1:
        parts.append(_exchange(config, local))
    return sorted(parts, key=lambda part: -part.num_bytes)


def captured_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Return the batch sizes that a decode rank captures as graphs, or tokens of a prefill rank's chunks."""
    if config.device != "cuda" or config.kv_cache_dtype != "packed" or config.enforce_eager:
        return ()
    return graph_sizes(config.max_num_seqs) if config.role == "decode" else chunk_sizes(config.max_num_batched_tokens)


def _weights(config: EngineConfig, model: DeepSeekV4Config) -> MemoryPart:
    shard = shard_of(config, model)
    weights = count_weights(model, shard, dtype=config.dtype, keeps_packed=config.device == "cuda")
    largest = sorted(weights.parts.items(), key=lambda item: -item[1])[:3]
    rank = "" if shard.count == 1 else f" of one of {shard.count} ranks"
    experts = f"experts {weights.experts}{', shared out' if shard.by_expert else ''}"
    return MemoryPart(
        name="weights",
        num_bytes=weights.total,
        how=f"{counted(model.num_hidden_layers, 'layer')}{rank}, {experts}, linears {weights.matrices}: "
        + ", ".join(f"{group} {_size(num_bytes)}" for group, num_bytes in largest),
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def _graphs(config: EngineConfig, local: DeepSeekV4Config) -> MemoryPart:
    is_decode = config.role == "decode"
    each, bytes_of_node = NODES_OF_LAYER, NODE_BYTES
    if not is_decode:
        each, bytes_of_node = NODES_OF_CHUNK_LAYER, CHUNK_NODE_BYTES
    sizes, nodes = captured_sizes(config), each * local.num_hidden_layers + NODES_OF_STEP
    num_bytes, how = 0, "none: decode kernels read packed rows only"
    if config.enforce_eager:
        how = "none are captured (enforce_eager)"
    if sizes:
        num_bytes = CAPTURE_BYTES + len(sizes) * nodes * bytes_of_node
        once = f"{CAPTURE_BYTES // MIB} MiB once"
        most = counted(sizes[-1], "sequence" if is_decode else "token")
        how = f"{len(sizes)} of up to {most}, about {nodes:,} nodes each, and {once}"
    return MemoryPart(name="graphs", num_bytes=num_bytes, how=how)


def _decode_workspace(config: EngineConfig, local: DeepSeekV4Config, layout: KVLayout) -> MemoryPart:
    """The tensors of the largest step, one token a sequence: graphs share them, but for the logits that each leaves."""
    rows, longest = config.max_num_seqs, config.max_model_len or local.max_position_embeddings
    columns, vocab = layout.num_blocks_for(longest), _scored_tokens(config, local)
    activations = rows * (_streams(local) + 8 * _queries(local)) + _experts(rows, local)
    entries = 0
    if local.layers_of(CSA_RATIO):
        entries = min(rows * (columns * (layout.block_tokens // CSA_RATIO) + EXPERTS_TOKENS), WORKSPACE_SCORES)
    scores = 4 * entries + 8 * local.index_topk * (rows + entries // (2 * local.index_topk))
    logits = 4 * vocab * sum(captured_sizes(config) or (rows,))
    lists = 4 * _SAMPLING_LISTS * vocab * rows
    table = 4 * rows * (columns + 20)  # block tables, rows, settings
    return MemoryPart(
        name="workspace",
        num_bytes=activations + scores + logits + lists + table,
        how=f"of {counted(rows, 'sequence')}: logits of all graphs {logits / MIB:,.0f} MiB, "
        f"lists of sampling {lists / MIB:,.0f}, indexer's scores {scores / MIB:,.0f}, "
        f"layer {activations / MIB:,.0f}, block tables {table / MIB:,.1f}",
    )


def _prefill_workspace(config: EngineConfig, local: DeepSeekV4Config, layout: KVLayout) -> MemoryPart:
    """The tensors of the longest chunk, of kernels where they take it, else of torch's operations; those of graphs."""
    tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
    scores, bytes_of_matrix = 0, 6  # as float32 and as bfloat16
    if config.kv_cache_dtype == "packed" and tokens <= MOST_TOKENS:
        bytes_of_matrix = 2
        scores = 4 * CHUNK_SCORES if local.layers_of(CSA_RATIO) else 0
        activations = _chunk(tokens, local)
    else:
        activations = tokens * (_streams(local) + _PROMPT_BYTES_OF_CHANNEL * _queries(local)) + _PROMPT_TILES
        activations += _experts(tokens, local)
    # The largest linear layer: its codes are dequantised for each chunk.
    matrix = local.q_lora_rank * (local.num_attention_heads * local.head_dim + _index_channels(local))
    dequantised = bytes_of_matrix * matrix
    logits = 4 * _TORCH_SAMPLING_WORDS * rows * local.vocab_size
    undo = rows * layout.slot_bytes  # engine.rollback
    graphs = _chunk_graphs(config, local, layout)
    return MemoryPart(
        name="workspace",
        num_bytes=activations + scores + dequantised + logits + undo + graphs,
        how=f"of {counted(tokens, 'token')}: layer {activations / MIB:,.0f} MiB, indexer's scores {scores / MIB:,.0f}, "
        f"a dequantised matrix {dequantised / MIB:,.0f}, logits of {rows} {logits / MIB:,.0f}, states kept "
        f"{undo / MIB:,.0f}; of all graphs {graphs / MIB:,.0f}",
    )


def _chunk(tokens: int, local: DeepSeekV4Config) -> int:
    """Return bytes that kernels hold at once for a chunk of prompts, besides the indexer's scores."""
    held = tokens * (_streams(local) + _MIX_BYTES_OF_CHANNEL * local.hidden_size)
    return held + max(tokens * _attended(local), _experts(tokens, local))


def _chunk_graphs(config: EngineConfig, local: DeepSeekV4Config, layout: KVLayout) -> int:
    """Return bytes of what graphs of chunks share: tensors of the longest, the streams that it leaves, its inputs."""
    sizes = captured_sizes(config)
    if not sizes:
        return 0
    entries = layout.num_blocks_for(CHUNK_CONTEXT) * (layout.block_tokens // CSA_RATIO)
    scores = 4 * min(sizes[-1] * entries, CHUNK_SCORES) if local.layers_of(CSA_RATIO) else 0
    streams = 2 * sizes[-1] * local.hc_mult * local.hidden_size
    table = 4 * (config.max_num_seqs * (layout.num_blocks_for(CHUNK_CONTEXT) + 3) + 4 * sizes[-1])
    return _chunk(sizes[-1], local) + scores + streams + table


def _sampling_pools(config: EngineConfig, local: DeepSeekV4Config) -> MemoryPart:
    """For each row: how often each token was said (int16), its bias (float32), whether it is allowed (a bit)."""
    vocab = _scored_tokens(config, local)
    each = 2 * vocab + 4 * vocab + 4 * -(-vocab // 32)
    return MemoryPart(
        name="sampling",
        num_bytes=config.max_num_seqs * each,
        how=f"{counted(config.max_num_seqs, 'row')} of history, bias and mask: {each:,} B each",
    )


def _exchange(config: EngineConfig, local: DeepSeekV4Config) -> MemoryPart:
    """Communicators, regions that peers write (kernels.one_shot), and logits as they are gathered and put in order."""
    regions = 2 * config.ranks * ONE_SHOT_BYTES
    logits = 2 * 4 * local.vocab_size * config.max_num_seqs
    return MemoryPart(
        name="exchange",
        num_bytes=COMMUNICATORS_BYTES + regions + logits,
        how=f"among {config.ranks} ranks: NCCL {COMMUNICATORS_BYTES // MIB} MiB (assumed), peers' memory "
        f"{regions / MIB:,.0f}, gathered logits {logits / MIB:,.0f}",
    )


def _scratch() -> MemoryPart:
    return MemoryPart(
        name="transport",
        num_bytes=SCRATCH_BYTES + 3 * CHECKSUM_BYTES,
        how="a pool to measure lanes by, and checksums of caches; staging of the host lane lies in host memory",
    )


def _context() -> MemoryPart:
    return MemoryPart(name="CUDA", num_bytes=CONTEXT_BYTES, how="context, code of kernels, libraries: as on an H200")


def _allocator() -> MemoryPart:
    return MemoryPart(
        name="allocator", num_bytes=ALLOCATOR_BYTES, how="unused in its blocks, weights rounded up: as on an H200"
    )


def _streams(local: DeepSeekV4Config) -> int:
    """Return bytes a token: the streams before and behind a sublayer (bf16), its input and output (float32)."""
    return (2 * 2 * local.hc_mult + 2 * 4) * local.hidden_size


def _queries(local: DeepSeekV4Config) -> int:
    """Return channels a token: of the attention's queries or the indexer's, which are never held at once."""
    return max(local.num_attention_heads * local.head_dim, _index_channels(local))


def _attended(local: DeepSeekV4Config) -> int:
    """Return bytes a token that a layer's attention holds at once, by kernels, besides streams, input and output.

    What the compressors and the indexer's weights project (float32); latent and row; queries as they come out of their
    product, turned, and what attention makes of them (bf16); the indexer's, ready (f16 at most), and what they select.
    """
    queries = local.num_attention_heads * local.head_dim
    projected = 4 * 4 * (local.head_dim + local.index_head_dim) + 4 * local.index_n_heads
    latent = 2 * (local.q_lora_rank + local.head_dim) + 2 * local.head_dim
    indexer = 2 * _index_channels(local) + 4 * (local.index_n_heads + local.index_topk)
    return projected + latent + 2 * (queries + _index_channels(local)) + 2 * 2 * queries + indexer


def _scored_tokens(config: EngineConfig, local: DeepSeekV4Config) -> int:
    """Return how many tokens a rank chooses from: of all, or of its own rows of the head where it plays a group."""
    return Shard.parse(config.simulate_rank).head_rows(local)


def _index_channels(local: DeepSeekV4Config) -> int:
    return local.index_n_heads * local.index_head_dim if local.layers_of(CSA_RATIO) else 0


def _experts(tokens: int, local: DeepSeekV4Config) -> int:
    """Return bytes of routed experts: rows of both products, shares of sums of the first, whose rows they are, inputs.

    Of more than EXPERTS_TOKENS tokens, rows of the last product take EXPERTS_PARTS at a time, and sums are added.
    """
    rows, inner = tokens * local.num_experts_per_tok, local.moe_intermediate_size
    if tokens > EXPERTS_TOKENS:
        each = 2 * local.hidden_size + 4 * local.n_routed_experts + 2 * 4 * local.hidden_size
        return rows * (2 * inner + 16) + tokens * each + min(rows * 4 * local.hidden_size, EXPERTS_PARTS)
    lists = 2 * 4 * rows * local.n_routed_experts + 2 * 2 * tokens * local.hidden_size
    return rows * (4 * local.hidden_size + 2 * inner) + 4 * 3 * rows * 2 * inner * 4 + lists
