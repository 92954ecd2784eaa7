"""Which part of a step a kernel belongs to: by its name, and where one kernel serves several, by its neighbours.

Products of a few tokens with a matrix are one kernel wherever they stand in a layer. Between which others a launch
stands says which product it is: what comes before attention projects, what follows it is its output, what stands among
the experts is the shared one, and what comes before sampling is the head. Two products of one part are told apart by
their grids only. Kernels that are in no table are a part of their own, under their own name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PARTS: dict[str, tuple[str, ...]] = {
    "hyper-connections": ("spread_kernel", "finish_kernel", "spread_chunk_kernel", "finish_chunk_kernel"),
    "cache write": ("cache_write_kernel", "commit_window_kernel", "store_rows_kernel"),
    "indexer": ("query_kernel", "logits_kernel", "chunk_scores_kernel", "top_k_kernel", "row_top_k_kernel"),
    "attention": ("attention_kernel", "combine_kernel", "token_kernel", "shared_kernel"),
    "gate": ("gate_kernel", "gate_beside_kernel", "route_kernel", "expert_choice_kernel", "sort_kernel"),
    "routed experts": (
        "up_kernel",
        "down_kernel",
        "sum_kernel",
        "up_blocks_kernel",
        "down_blocks_kernel",
        "sum_blocks_kernel",
    ),
    "sampling": ("scan_kernel", "weigh_kernel", "choose_kernel"),
    "begin and end": ("begin_step_kernel", "end_step_kernel"),
}
PRODUCTS = (
    "few_kernel", "many_kernel", "held_kernel", "few_pair_kernel", "many_pair_kernel", "quantize_kernel", "norm_kernel",
    "dequantize_kernel", "swiglu_kernel",
)  # fmt: skip
FIRST_OF_STEP, LAST_OF_STEP = PARTS["begin and end"]

_PART_OF = {kernel: part for part, kernels in PARTS.items() for kernel in kernels}
_ATTENTION = ("cache write", "indexer", "attention")
_EXPERTS = ("gate", "routed experts")
_LIBRARY_PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|cublas", re.IGNORECASE)
_EXCHANGE = re.compile(r"one_shot_kernel|nccl", re.IGNORECASE)
_LONGEST = 60


def is_product(kernel: str) -> bool:
    """Return whether a kernel multiplies tokens with a matrix, ours or a library's, or makes them ready for it."""
    return kernel in PRODUCTS or bool(_LIBRARY_PRODUCT.search(kernel))


def is_exchange(kernel: str) -> bool:
    """Return whether a kernel exchanges with other ranks. It stands behind many parts, and tells nothing of them."""
    return bool(_EXCHANGE.match(kernel))


def parts_of(kernels: Sequence[str]) -> list[str]:
    """Return the part of each of `kernels`, names of launches in the order in which they began."""
    known = [_PART_OF.get(kernel, "") for kernel in kernels]
    after: list[str] = []
    following = ""
    for part in reversed(known):
        after.append(following)
        following = part or following
    after.reverse()
    parts, before = [], ""
    for kernel, part, following in zip(kernels, known, after, strict=True):
        if part:
            before = part
        if is_exchange(kernel):
            part = "exchange"
        parts.append(part or (_product(before, following) if is_product(kernel) else short(kernel)))
    return parts


def short(kernel: str) -> str:
    """Return a name that fits a table: without the types that C++ writes into it, and cut."""
    plain = re.sub(r"^(void|int|float) ", "", kernel)
    functor = re.search(r"(\w+)(?:Functor|_kernel_cuda|_impl)\b", plain)
    bare = re.sub(r"[<(].*", "", plain).removeprefix("at::native::")
    name = f"{bare} {functor.group(1)}" if functor and functor.group(1) not in bare else bare
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _product(before: str, after: str) -> str:
    """Return the part of a product between two known parts, "" where a trace begins or ends."""
    if after in _ATTENTION:
        return "projections"
    if before in _ATTENTION:
        return "output"
    if before in _EXPERTS or after in _EXPERTS:
        return "shared expert"
    return "head" if after == "sampling" else "products"
