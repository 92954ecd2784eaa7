"""Counts of instructions per weight and key: their arithmetic, and that the kept ones are of the tiles that ship."""

import dataclasses
import json

import pytest

from kernels import instructions
from kernels.instructions import FILE, TOKENS, counts
from kernels.offline import Report, tile_name
from kernels.triton_env import ARCHES


@pytest.fixture(scope="module")
def found():
    return [one for arch in ARCHES for one in counts(arch)]


def count(found, read, arch, tokens):
    return next(one for one in found if (one.read, one.arch, one.tokens) == (read, arch, tokens))


def report(**fields):
    return Report("op", "kernel", "tile", "sm_120", **fields)


def test_instructions_of_a_loop_are_shared_by_what_one_pass_of_it_reads(found):
    one = count(found, "o_b", "sm_120", 64)  # tiles of 64 rows and 128 channels, by 4 warps
    assert one.per_unit(report(loop=640, instructions=5000)) == 32 * 4 * 640 / (64 * 128)


def test_instructions_of_a_kernel_without_loop_are_shared_by_what_a_program_reads(found):
    one = count(found, "o_b", "sm_120", 1)  # 8 warps, each 2 chunks of 128 channels of 16 rows
    assert one.per_unit(report(loop=70, instructions=512)) == 32 * 8 * 512 / (8 * 2 * 16 * 128)


def test_experts_take_the_count_that_the_gate_makes(found):
    one = count(found, "experts, up", "sm_120", 1)
    assert one.per_unit(report(loop=640, instructions=5000, per_weight=2.5)) == 2.5


def test_a_compilation_without_the_loop_that_is_counted_is_refused(found):
    with pytest.raises(ValueError, match="has no loop"):
        count(found, "o_b", "sm_120", 64).per_unit(report(instructions=5000))
    with pytest.raises(ValueError, match="none per weight"):
        count(found, "experts, up", "sm_120", 1).per_unit(report(loop=3))


def test_a_matrix_whose_kernel_the_gate_does_not_compile_is_refused(monkeypatch):
    head = dataclasses.replace(instructions._MATRICES["head"], channels=4095)
    monkeypatch.setitem(instructions._MATRICES, "head", head)
    with pytest.raises(LookupError, match="the gate compiles no few_kernel"):
        counts("sm_120")


def test_kept_counts_are_of_the_tiles_that_ship(found):
    kept = json.loads(FILE.read_text())
    shipped = {
        arch: {
            str(tokens): {
                one.read: f"{one.variant.kernel.__name__} [{tile_name(one.variant)}]"
                for one in found
                if (one.arch, one.tokens) == (arch, tokens)
            }
            for tokens in TOKENS
        }
        for arch in ARCHES
    }
    assert kept["kernels"] == shipped, "tiles have changed: python -m kernels.instructions"
