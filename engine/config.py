"""EngineConfig: what a worker group is told, already merged from flags, environment, file and defaults."""

from __future__ import annotations

from typing import Literal

import msgspec

from router.protocol import WorkerRole

Dtype = Literal["float32", "bfloat16"]
Device = Literal["cpu", "cuda"]
LoadFormat = Literal["auto", "synthetic"]
KvCacheDtype = Literal["fp32", "bf16", "packed"]
IndexCacheDtype = Literal["fp8", "fp4"]
TransportName = Literal["auto", "nixl", "host", "ucxx", "local"]
AllReduce = Literal["auto", "nccl", "one-shot"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker group. Nothing is changed after construction; derived numbers live in MemoryPlan.

    model: folder with config.json and safetensors.   served_model_name: "" means the folder's name.
    load_format: auto reads the folder's safetensors; synthetic draws random weights of the same shapes (benchmarks).
    weight_cache: folder where ranks keep their weights, packed and cut, for later starts; "" for none.
    simulate_rank: "0/4": this process is rank 0 of a group of 4, alone and without exchange; "" is not. Synthetic only.
    num_layers: serve the first layers only; 0 means all. Synthetic only.
    enforce_eager: capture no CUDA graphs, neither of decode steps nor of short chunks of prompts.
    gpu_memory_gib: of each GPU; 0 means what it has. What `isthmus plan` counts with where there is none.
    index_cache_dtype: form of index keys when kv_cache_dtype is packed (otherwise they are stored as kv rows are).
    index_hadamard: rotate index queries and keys before rounding; None means yes for fp4, no for fp8.
    max_num_batched_tokens: tokens of one prefill chunk.   max_num_seqs: sequences of one batch.
    max_model_len: prompt and output of one request; 0 means the model's own maximum, as far as memory allows.
    block_size: tokens of a block, a multiple of every compression ratio.
    num_blocks: 0 means as many as fit.
    kv_cache_memory_gib: what the cache may take at most; 0 means all that is left of a GPU.
    landings_ahead: reservations that decode accepts beyond max_num_seqs.   waiting_ahead: prompts that may wait at
    prefill, whatever their length; more while all of them fit into one chunk, as slots allow.
    ranks: processes of the group, one per GPU, that compute one model together (docs/ranks.md).
    expert_parallel: ranks share routed experts out, whole ones, instead of cutting each; None: engine.expert_cut says.
    all_reduce: how ranks with GPUs sum; auto: by size, as measured when they meet (docs/ranks.md).
    numa_node: -1 means unpinned.
    cpus: CPU list such as "0-15,32" for the simulated split of a one-node machine; "" means the node's own.
    threads: of a rank's arithmetic on the CPU; more only pays for models much larger than the tiny one.
    transfer_timeout_s: what one write may take at least; large ones get more, by measured bandwidth.
    kv_checksum: compare every cache that lands with what was sent; without it only the router's trial requests are.
    allow_tcp: serve even if the cache travels over TCP between processes of one host.
    pool_poison: fill every pool with NaN at start (tests).
    test_seams: open /seams, through which tests hold and strike requests; never in production.
    logits_log: folder where ranks append the logits of every sampled token; "" for none; needs test_seams.
    """

    model: str
    role: WorkerRole
    worker_id: str = ""
    served_model_name: str = ""
    load_format: LoadFormat = "auto"
    weight_cache: str = ""
    simulate_rank: str = ""
    num_layers: int = 0
    dtype: Dtype = "bfloat16"
    kv_cache_dtype: KvCacheDtype = "packed"
    index_cache_dtype: IndexCacheDtype = "fp8"
    index_hadamard: bool | None = None
    max_num_batched_tokens: int = 4096
    max_num_seqs: int = 16
    max_model_len: int = 0
    block_size: int = 256
    num_blocks: int = 0
    kv_cache_memory_gib: float = 1.0
    gpu_memory_gib: float = 0.0
    enforce_eager: bool = False
    landings_ahead: int = 8
    waiting_ahead: int = 2
    ranks: int = 1
    expert_parallel: bool | None = None
    all_reduce: AllReduce = "auto"
    device: Device = "cpu"
    threads: int = 1
    transport: TransportName = "auto"
    numa_node: int = -1
    cpus: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    landing_timeout_s: float = 600.0
    transfer_timeout_s: float = 3.0
    kv_checksum: bool = False
    allow_tcp: bool = False
    drain_timeout_s: float = 30.0
    pool_poison: bool = False
    test_seams: bool = False
    logits_log: str = ""

    @property
    def uses_hadamard(self) -> bool:
        return self.index_cache_dtype == "fp4" if self.index_hadamard is None else self.index_hadamard
