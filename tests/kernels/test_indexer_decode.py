"""The decode step's indexer on the CPU: its references agree with indexer.py; what is refused."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from kernels.indexer import index_entries
from kernels.indexer_decode import index_query, index_select, top_k_of_rows
from kernels.norm_rope import rope
from kernels.quant import hadamard
from kernels.ragged import RaggedBatch
from kernels.rows import round_trip


def _cases():
    name = "indexer_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()
make_case = cases.make_case
SPANS = [(0, 1), (31, 2), (35, 1), (98, 3), (300, 1)]
CHUNK = [(0, 50), (98, 41), (300, 7)]


@pytest.mark.parametrize("fmt", ["fp8_index", "fp4_index"])
@pytest.mark.parametrize("spans", [SPANS, CHUNK], ids=["step", "chunk"])
def test_tokens_select_what_the_model_does_without_kernels(fmt, spans):
    case = make_case(spans, fmt=fmt, dim=128, hadamard=fmt == "fp4_index")
    selected = index_select(case.query(), case.batch, case.keys, ratio=4, top_k=8)
    tables = [[b for b in row if b >= 0] for row in case.batch.block_table.tolist()]
    ragged = RaggedBatch.build(spans, slots=[0] * len(spans), block_tables=tables)
    query = rope(case.q, case.rotation)
    query = round_trip(hadamard(query) if case.hadamard else query, fmt)
    wanted, is_finite = index_entries(query, case.weight * case.scale, ragged, case.keys, ratio=4, top_k=8)
    assert bool(is_finite.all())
    for mine, its in zip(selected.tolist(), wanted.tolist(), strict=True):
        assert [entry for entry in mine if entry >= 0] == sorted(entry for entry in its if entry >= 0)


def test_rows_that_selections_have_got_wrong():
    assert cases.rows_fault(list(cases.score_rows().values()), 512) == ""


def test_equal_scores_go_to_the_lower_entry_and_entries_ascend():
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, math.nan]])
    assert top_k_of_rows(scores, torch.tensor([5], dtype=torch.int32), 3)[0].tolist() == [[0, 1, 3]]


def test_padding_and_tokens_that_see_little_take_all_there_is():
    case = make_case([(0, 1), (11, 1)], padding=1)
    selected = index_select(case.query(), case.batch, case.keys, ratio=4, top_k=4)
    assert selected.tolist() == [[-1] * 4, [0, 1, 2, -1], [-1] * 4]


def test_a_key_that_was_never_written_is_reported():
    case = make_case([(300, 1), (300, 1)])
    case.keys.scales[int(case.batch.block_table[1, 3]), 2] = math.nan
    selected = index_select(case.query(), case.batch, case.keys, ratio=4, top_k=8)
    assert [cases.is_unsound(row) for row in selected] == [False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "bf16"}, "bf16"),
        ({"hadamard": True}, "hadamard"),
        ({"weight": torch.zeros(1, 2)}, "weights"),
        ({"rotation": torch.zeros(1, 4)}, "rotation"),
        ({"q": torch.zeros(1, 5, 48)}, "48 channels"),
        ({"q": torch.zeros(1, 5, 64, dtype=torch.float16)}, "float16"),
    ],
)
def test_wrong_queries_are_refused(changes, message):
    case = make_case([(40, 1)])
    given = {"q": case.q, "weight": case.weight, "rotation": case.rotation, "fmt": "fp8_index"} | changes
    with pytest.raises(ValueError, match=message):
        index_query(
            given.pop("q"), given.pop("weight"), case.batch, given.pop("rotation"), scale=1.0, **given
        )  # fmt: skip


def test_keys_of_another_format_are_refused():
    case, other = make_case([(40, 1)]), make_case([(40, 1)], fmt="fp4_index")
    with pytest.raises(ValueError, match="fp4_index keys"):
        index_select(case.query(), case.batch, other.keys, ratio=4, top_k=8)


@pytest.mark.parametrize(
    ("scores", "lengths"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_wrong_scores_are_refused(scores, lengths):
    with pytest.raises(ValueError, match="wanted"):
        top_k_of_rows(scores, lengths, 2)
