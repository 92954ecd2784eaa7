"""What decode attention promises on any device: it equals the prefill path, and refuses what it can't read."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kernels.norm_rope import rope
from kernels.ragged import RaggedBatch
from kernels.row_load import key_rows
from kernels.rows import Rows
from kernels.sparse_attention import sparse_attention
from kernels.sparse_attention_decode import plan, rare_variants, sparse_attention_decode, variants
from kernels.sparse_attention_many import MANY, many_tile
from kernels.sparse_attention_triton import attention_kernel
from kernels.tiles import tile_for
from kernels.triton_env import ARCHES, MULTIPROCESSORS


def _cases():
    name = "sparse_attention_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()


@pytest.mark.parametrize("kind", ["selected", "visible", "window"])
def test_decode_equals_the_ragged_path(kind):
    """The ragged path takes new rows apart and rings as they were before; decode takes them as rows, or from rings."""
    spans = [(40, 3), (19, 1), (101, 2)]
    case = cases.make_case(spans, fmt="fp32", kind=kind, staged=True)
    old, new = case.rest, case.rest["new"]
    ragged = RaggedBatch.build(
        spans,
        slots=case.batch.slots.tolist(),
        block_tables=[[b for b in row if b >= 0] for row in case.batch.block_table.tolist()],
    )
    unit = torch.arange(case.batch.num_tokens)
    out, _ = sparse_attention(
        case.q,
        new.read(unit, torch.zeros_like(unit)),
        ragged,
        case.window,
        sink=old["sink"],
        scale=old["scale"],
        compressed=old["compressed"],
        ratio=old["ratio"],
        selected=None if old["selected"] is None else old["selected"].long(),
    )
    wanted = rope(out, old["rotation"].conj())
    assert torch.allclose(case.run()[0], wanted, atol=1e-5)


def test_a_ragged_batch_is_a_decode_batch():
    batch = RaggedBatch.build([(7, 2), (0, 1)], slots=[3, 1], block_tables=[[5], []])
    decode = batch.decode
    assert decode.positions.tolist() == [7, 8, 0]
    assert decode.sequence.tolist() == [0, 0, 1]
    assert decode.starts.tolist() == [7, 0]
    assert decode.query_start.tolist() == [0, 2, 3]
    assert decode.block_table.tolist() == [[5], [-1]]
    assert (decode.num_tokens, decode.max_query_len) == (3, 2)
    assert decode.slots.dtype == torch.int32


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 16, 64, 300])
@pytest.mark.parametrize("keys", [128, 640, 1152])
def test_splits_cover_all_keys_with_none_to_spare(keys, tokens, batch_invariant):
    cut = plan(
        cases.make_tile(BLOCK_N=32, RESIDENT=2),
        tokens=tokens,
        heads=16,
        keys=keys,
        is_dynamic=False,
        multiprocessors=188,
        batch_invariant=batch_invariant,
    )
    assert (cut.splits - 1) * cut.tiles * 32 < keys <= cut.splits * cut.tiles * 32
    assert cut.splits <= cut.combined
    if batch_invariant:
        assert cut.constants["SPLITS"] > 1  # a result that skipped the combination would have other bits


REFUSED = {
    "q of another width": (lambda c: {"q": c.q[..., :64].contiguous()}, "tokens of 128"),
    "q with gaps": (lambda c: {"q": c.q.repeat(1, 2, 1)[:, ::2]}, "contiguous"),
    "a sink for other heads": (lambda c: {"sink": torch.zeros(5)}, "sink of shape"),
    "real rotations": (lambda c: {"rotation": c.rest["rotation"].real}, "complex64"),
    "rotations with gaps": (lambda c: {"rotation": c.rest["rotation"].repeat(1, 2)[:, ::2]}, "contiguous complex64"),
    "rows of two formats": (lambda c: {"compressed": cases.make_rows("bf16", 128, units=9, rows=8)}, "bf16 of 128"),
    "no ratio": (lambda c: {"ratio": 0}, "ratio of 0"),
    "a selection of 64-bit numbers": (lambda c: {"selected": c.rest["selected"].long()}, "int32"),
    "a selection without entries": (lambda c: {"compressed": None}, "selection"),
    "new rows for fewer tokens": (lambda c: {"new": cases.make_rows("packed", 128, units=1, rows=1)}, "new rows"),
    "an lse of another type": (lambda c: {"lse": torch.zeros(2, 4).double()}, "lse"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_inputs_are_refused_by_name(what):
    case = cases.make_case([(40, 1), (90, 1)])
    change, said = REFUSED[what]
    given = {"q": case.q, "window": case.window, **case.rest, **change(case)}
    with pytest.raises(ValueError, match=said):
        sparse_attention_decode(given.pop("q"), case.batch, given.pop("window"), **given)


def test_several_tokens_of_a_sequence_need_their_rows_apart():
    case = cases.make_case([(40, 3)], staged=True)
    with pytest.raises(ValueError, match="pass `new`"):
        sparse_attention_decode(case.q, case.batch, case.window, **(case.rest | {"new": None}))


@pytest.mark.parametrize(("unit_bytes", "offset"), [(3208, 0), (3216, 8)])
def test_rows_that_can_not_be_read_in_16_bytes_are_refused(unit_bytes, offset):
    pool = torch.zeros(3, unit_bytes, dtype=torch.uint8)
    rows = Rows.view(pool, "packed", width=128, rows=16, offset=offset, value_bytes=192, scale_bytes=8)
    with pytest.raises(ValueError, match="multiples of 16"):
        key_rows(rows)


def test_rows_of_other_formats_are_refused():
    with pytest.raises(ValueError, match="attention reads packed, bf16, fp32 rows"):
        key_rows(cases.make_rows("fp8_index", 128, units=1, rows=8))


def test_rows_of_head_sizes_that_no_kernel_cuts_are_refused():
    with pytest.raises(ValueError, match="192 channels: attention reads"):
        key_rows(cases.make_rows("bf16", 192, units=1, rows=8))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("keys", "kind"), [(640, "selected"), (1152, "visible"), (128, "window")])
def test_whatever_a_step_of_up_to_256_tokens_launches_is_compiled(keys, kind, batch_invariant, arch):
    compiled = variants(arch) + rare_variants(arch)
    compiled = [v for v in compiled if v.kernel is attention_kernel and v.constants["D"] == 512]
    for heads in (8, 16, 32, 64):
        of_kind = [v for v in compiled if (v.constants["H"], v.constants["RATIO"]) == (heads, RATIOS[kind])]
        for tokens in range(1, 257):
            tile = tile_for(
                "sparse_attention", arch, tokens=1 if batch_invariant else tokens, heads=heads, row_bytes=512
            )
            cut = plan(
                tile,
                tokens=tokens,
                heads=heads,
                keys=keys,
                is_dynamic=kind == "visible",
                multiprocessors=MULTIPROCESSORS[arch],
                batch_invariant=batch_invariant,
            )
            found = [v for v in of_kind if cut.constants.items() <= v.constants.items()]
            assert {"new_ptr" in v.constants for v in found} == {False, True}, f"{tokens} tokens of {heads} heads"


RATIOS = {"selected": 4, "visible": 128, "window": 0}


@pytest.mark.parametrize("kind", ["selected", "visible", "window"])
def test_steps_of_many_tokens_go_to_a_kernel_of_their_own(kind):
    """More than MANY tokens of packed rows, some sequence with several: in batch-invariant mode as ever."""

    def chosen(tokens, *, staged=True, batch_invariant=False):
        case = cases.make_case([(40, tokens)], heads=1, kind=kind, top_k=2, staged=staged)
        return many_tile(case.q.device, case.batch, case.rest["new"], batch_invariant=batch_invariant)

    assert chosen(MANY + 1) is tile_for("sparse_attention_many", "sm_120")
    assert chosen(MANY) is None
    assert chosen(MANY + 1, staged=False) is None
    assert chosen(MANY + 1, batch_invariant=True) is None
