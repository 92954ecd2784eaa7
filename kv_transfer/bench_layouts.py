"""The cache layouts that `isthmus bench transfer` moves, written out in numbers: this package knows no models.

A test compares them with what the engine makes of the models' own configurations.
"""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.layout import KVLayout, RowFormat, make_group

BLOCK_TOKENS = 256


def flash_layout() -> KVLayout:
    """DeepSeek-V4-Flash, packed rows and FP8 index keys: 3,850 bytes a token and a state record of 5.1 MB."""
    return _layout(layers=43, csa=21, hca=20, head=512, kv="packed", index="fp8_index")


def tiny_layout() -> KVLayout:
    """The tiny model that `make serve` starts, fp32 rows: 520 bytes a token and a state record of 0.5 MB."""
    return _layout(layers=6, csa=2, hca=2, head=128, kv="fp32", index="fp32")


LAYOUTS: dict[str, Callable[[], KVLayout]] = {"v4-flash": flash_layout, "tiny": tiny_layout}


def _layout(*, layers: int, csa: int, hca: int, head: int, kv: RowFormat, index: RowFormat) -> KVLayout:
    """csa, hca: layers that keep a row per 4 and per 128 tokens. Every layer keeps a window of 128 rows."""
    state_rows, index_head = 16, 128
    return KVLayout(
        block_tokens=BLOCK_TOKENS,
        groups=(
            make_group("csa_kv", "block", [("csa_kv", csa, BLOCK_TOKENS // 4, kv, head)]),
            make_group("csa_index", "block", [("csa_index", csa, BLOCK_TOKENS // 4, index, index_head)]),
            make_group("hca_kv", "block", [("hca_kv", hca, BLOCK_TOKENS // 128, kv, head)]),
            make_group(
                "state",
                "slot",
                [
                    ("window", layers, 128, kv, head),
                    ("csa_state", csa, state_rows, "fp32", 2 * head),
                    ("index_state", csa, state_rows, "fp32", 2 * index_head),
                    ("hca_state", hca, 3, "fp32", head),
                ],
            ),
        ),
    )
