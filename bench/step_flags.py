"""Flags of the commands that run an engine in their own process. No torch: `--help` and stored reports come at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from engine.flags import add_engine_flags

CHUNK_TOKENS = 4096
_OF_RANKS = ("ranks", "all_reduce")
# what a leader, a cluster or a network would need, and what follows from --batch, --context, --prompt, --chunk-tokens
_WITHOUT = (
    "served_model_name", "num_blocks", "kv_cache_memory_gib", "gpu_memory_gib", "pool_poison",
    "max_num_batched_tokens", "max_num_seqs", "max_model_len", "landings_ahead", "waiting_ahead", *_OF_RANKS,
    "transport", "host", "port", "worker_id", "landing_timeout_s", "transfer_timeout_s", "kv_checksum", "allow_tcp",
    "drain_timeout_s", "test_seams", "logits_log",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser, *, has_ranks: bool = False) -> None:
    """Add the engine's flags that say something in one process, or in the processes of one group."""
    add_engine_flags(parser, without=[name for name in _WITHOUT if not (has_ranks and name in _OF_RANKS)])


def add_prompt_flags(add: Callable[..., object]) -> None:
    """Add what says how long chunks of prompts are."""
    add(
        "--chunk-tokens", type=count, default=CHUNK_TOKENS, metavar="N",
        help="of a prompt in one step; a worker's max_num_batched_tokens (%(default)s)",
    )  # fmt: skip


def count(text: str) -> int:
    """Return a whole number of at least 1; argparse shows what is wrong with others."""
    return _whole(text, text)


def counts(text: str) -> list[int]:
    """Return "1,16,64" as numbers, ascending and without repetition."""
    return sorted({_whole(word.strip(), text) for word in text.split(",")})


def _whole(word: str, text: str) -> int:
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted whole numbers of at least 1")
    return int(word)
