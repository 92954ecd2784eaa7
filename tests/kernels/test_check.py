"""The offline gate lets pass what ships, and refuses what must not: each fault planted once."""

from __future__ import annotations

import dataclasses
import json
import os
import time

import pytest
import triton
import triton.language as tl

from deploy import cli
from kernels import check as gate
from kernels import offline, one_shot
from kernels.offline import LIMITS, Report
from kernels.tiles import Variant
from kernels.triton_env import ARCHES


@triton.jit
def product_kernel(a, b, out, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for step in range(steps):
        left = tl.load(a + m * 4096 + step * K + k[None, :])
        right = tl.load(b + (step * K + k[:, None]) * 4096 + n)
        total = tl.dot(left, right, total)
    tl.store(out + m * N + n, total)


@triton.jit
def converted_kernel(a, b, out, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, USED: tl.constexpr):
    """The left operand is made in registers; USED: something needs each step's sums before the next one begins."""
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for step in range(steps):
        left = tl.load(a + m * 4096 + step * K + k[None, :]).to(tl.bfloat16)
        right = tl.load(b + (step * K + k[:, None]) * 4096 + n)
        total = tl.dot(left, right, total)
        if USED:
            total = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], tl.float32, is_pure=True, pack=1)
    tl.store(out + m * N + n, total)


@triton.jit
def outer_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    tl.store(out + m[:, None] * N + n[None, :], tl.load(a + m)[:, None] * tl.load(b + n)[None, :])


@triton.jit
def heavy_kernel(a, out, M: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    total = tl.load(a + m * N + n)
    for step in tl.static_range(STEPS):
        total = tl.dot(total.to(tl.bfloat16), tl.trans(total).to(tl.bfloat16)) + step
    tl.store(out + m * N + n, total)


@triton.jit
def counting_kernel(out, READS: tl.constexpr):
    found = tl.atomic_add(out, 1, sem="relaxed")
    if READS:
        tl.store(out + 1, found)


PRODUCT = Variant(
    op="product",
    kernel=product_kernel,
    signature={"a": "*bf16", "b": "*bf16", "out": "*fp32", "steps": "i32"},
    constants={"M": 64, "N": 64, "K": 64},
    num_warps=4,
    num_stages=3,
    bytes_per_program=2 * 64 * 64 * 2,
    unaligned=("steps",),
)
OUTER = Variant(
    op="outer",
    kernel=outer_kernel,
    signature={"a": "*bf16", "b": "*bf16", "out": "*fp32"},
    constants={"M": 64, "N": 64},
    num_warps=4,
    num_stages=1,
    tensor_ops=(),
)


CONVERTED = dataclasses.replace(
    PRODUCT,
    kernel=converted_kernel,
    signature={**PRODUCT.signature, "a": "*fp8e4nv"},
    constants={**PRODUCT.constants, "USED": False},
)
HEAVY = Variant("heavy", heavy_kernel, {"a": "*fp32", "out": "*fp32"}, {"M": 128, "N": 128, "STEPS": 64}, 4, 1)
SPILLING = dataclasses.replace(PRODUCT, constants={"M": 128, "N": 256, "K": 32}, num_warps=1, num_stages=1)


def faults(variant: Variant, arch: str = "sm_120", **settings) -> str:
    (report,) = gate.check([(variant, arch)], cache=None, **settings)
    return " | ".join(report.faults)


@pytest.mark.parametrize("arch", ARCHES)
def test_a_sound_kernel_passes_and_is_described(arch):
    (report,) = gate.check([(PRODUCT, arch)], cache=None)
    assert report.faults == ()
    assert 0 < report.loop < report.instructions and report.registers > 16 and report.resident > 0
    assert report.smem >= 2 * 64 * 64 * 2
    # a lane of each of 4 warps executes every instruction of the loop once for the bytes of one pass
    assert report.per_byte == pytest.approx(report.loop * 128 / PRODUCT.bytes_per_program, abs=0.01)
    assert any(op.startswith("HGMMA" if arch == "sm_90" else "HMMA") for op in report.tensor)


def test_spills_are_refused():
    assert "B of spills: take a smaller tile" in faults(SPILLING)


def test_missing_tensor_instructions_are_refused():
    assert "no HMMA: " in faults(dataclasses.replace(OUTER, tensor_ops=("HMMA",)))


def test_tensor_instructions_of_another_kind_than_declared_are_refused():
    said = faults(dataclasses.replace(PRODUCT, tensor_ops=("QMMA",)))
    assert "no QMMA: " in said and "HMMA.16816.F32.BF16 beside the declared ['QMMA']" in said


def test_too_much_shared_memory_is_refused():
    tile = dataclasses.replace(PRODUCT, constants={"M": 64, "N": 64, "K": 256}, num_warps=8, num_stages=4)
    said = faults(tile)
    assert "B of shared memory, a block has 101,376: fewer stages" in said
    assert LIMITS["sm_120"].block_smem == 101_376


def test_a_product_that_runs_on_while_its_operand_s_registers_change_is_refused():
    said = faults(CONVERTED, "sm_90")
    assert "4 products with their left operand in registers, in a loop that does not wait for them" in said


@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        (dataclasses.replace(CONVERTED, constants={**CONVERTED.constants, "USED": True}), "sm_90"),  # waited for
        (PRODUCT, "sm_90"),  # runs on, both operands in shared memory
        (CONVERTED, "sm_120"),  # mma.sync
    ],
    ids=["waited for", "shared memory", "sm_120"],
)
def test_a_product_whose_operands_stay_is_not(variant, arch):
    assert faults(variant, arch) == ""


def test_too_many_instructions_for_a_packed_weight_are_refused():
    tile = dataclasses.replace(PRODUCT, constants={"M": 64, "N": 64, "K": 32})
    variant = dataclasses.replace(tile, has_packed_weights=True)
    (report,) = gate.check([(variant, "sm_120")], cache=None)
    assert report.per_weight == pytest.approx(report.loop * 32 / 256 / sum(report.tensor.values()), abs=0.01)
    assert report.faults == ()
    report = dataclasses.replace(report, per_weight=10.2)
    (fault,) = offline._faults(report, variant)
    assert "10.2 instructions a weight: at most 10.1, or issue limits the loop" in fault


@pytest.mark.parametrize("arch", ARCHES)
def test_atomics_of_a_kernel_for_peers_are_refused(arch):
    """Those whose result is read, and those whose is not: each has an instruction of its own."""
    counting = Variant("count", counting_kernel, {"out": "*i32"}, {"READS": True}, 4, 1, tensor_ops=(), has_peers=True)
    for variant in (counting, dataclasses.replace(counting, constants={"READS": False})):
        assert "1 atomics: PCIe carries none to a peer" in faults(variant, arch)
    assert faults(dataclasses.replace(counting, has_peers=False), arch) == ""


def test_a_kernel_for_peers_without_flags_of_system_scope_is_refused():
    silent = dataclasses.replace(OUTER, has_peers=True)
    assert "no load or no store of system scope" in faults(silent)


@pytest.mark.parametrize("arch", ARCHES)
def test_the_sum_over_peers_has_flags_and_no_atomics(arch):
    (report,) = gate.check([(one_shot.variants(arch)[1], arch)], cache=None)
    assert (report.atomics, report.flags, report.faults) == (0, 1, ())
    assert report.wide == 1 + 4  # x, and what each of four ranks has written


def test_one_byte_loads_of_an_unaligned_pointer_are_counted():
    tile = dataclasses.replace(OUTER, signature={**OUTER.signature, "a": "*u8", "b": "*u8", "out": "*u8"})
    (report,) = gate.check([(dataclasses.replace(tile, unaligned=("a", "b")), "sm_120")], cache=None)
    assert report.narrow > 0 and report.faults == ()


def test_a_kernel_that_does_not_compile_is_refused_with_the_reason():
    said = faults(dataclasses.replace(PRODUCT, signature={**PRODUCT.signature, "a": "*fp8e4nv"}))
    assert "does not compile" in said and "fp8e4nv" in said


def test_a_variant_that_does_not_fit_its_kernel_is_refused():
    said = faults(dataclasses.replace(PRODUCT, signature={"a": "*bf16", "bb": "*bf16", "out": "*fp32", "steps": "i32"}))
    assert "arguments without a type or value ['b']" in said and "['bb']" in said


@pytest.mark.parametrize(
    ("variant", "limit_s"), [(HEAVY, 1), (SPILLING, 1), (HEAVY, 0.01)], ids=["triton", "ptxas", "stalled"]
)
def test_a_compilation_that_takes_too_long_is_ended(variant, limit_s):
    begin = time.monotonic()
    assert faults(variant, limit_s=limit_s) == f"not compiled in {limit_s} s of processor time: take a smaller tile"
    assert time.monotonic() - begin < 10 * limit_s + 10


def test_reports_are_kept_until_something_changes(tmp_path):
    job = [(OUTER, "sm_120")]
    (first,) = gate.check(job, cache=tmp_path)
    (again,) = gate.check(job, cache=tmp_path)
    assert not first.cached and again == dataclasses.replace(first, cached=True)
    (changed,) = gate.check([(dataclasses.replace(OUTER, num_warps=8), "sm_120")], cache=tmp_path)
    assert not changed.cached


def test_a_kept_refusal_still_refuses(tmp_path):
    job = [(dataclasses.replace(OUTER, tensor_ops=("HMMA",)), "sm_120")]
    gate.check(job, cache=tmp_path)
    (again,) = gate.check(job, cache=tmp_path)
    assert again.cached and again.faults


def test_a_torn_cache_file_is_compiled_anew(tmp_path):
    gate.check([(OUTER, "sm_120")], cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:40])
    (report,) = gate.check([(OUTER, "sm_120")], cache=tmp_path)
    assert not report.cached and report.faults == ()


def test_what_another_run_has_compiled_meanwhile_is_taken_from_it(tmp_path, monkeypatch):
    job = [(OUTER, "sm_120")]
    gate.check(job, cache=tmp_path)
    recall, asked = gate._recall, []

    def not_yet(path):
        asked.append(path)
        return recall(path) if len(asked) > 1 else None

    monkeypatch.setattr(gate, "_recall", not_yet)
    (report,) = gate.check(job, cache=tmp_path)
    assert report.cached


def test_a_cache_that_cannot_be_written_is_said_once_and_nothing_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    jobs = [(OUTER, "sm_120"), (OUTER, "sm_90")]
    reports = gate.check(jobs, cache=tmp_path / "file" / "folder")
    assert [report.faults for report in reports] == [(), ()]
    assert capsys.readouterr().err.count("reports are not kept: ") == 1


def test_every_shipped_variant_passes(tmp_path, capsys):
    """What `make check` runs; with its cache, so that make check test compiles once."""
    code = gate.main(["--json", str(tmp_path / "rows.json")])
    said = capsys.readouterr().out
    assert code == 0, said
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["arch"] for row in rows} == set(ARCHES)
    assert all(row["spill"] == 0 and row["instructions"] for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHES)
def test_every_variant_that_is_too_rare_for_the_gate_passes_too(arch):
    reports = gate.check([(variant, arch) for variant in gate.rare(arch)], cache=gate.cache_folder())
    assert {(report.tile, report.faults) for report in reports if report.faults} == set()


def test_failures_exit_with_one_and_say_which(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gate, "shipped", lambda arch: [OUTER, dataclasses.replace(OUTER, tensor_ops=("HMMA",))])
    assert gate.main(["--arch", "sm_120"]) == 1
    said = capsys.readouterr().out
    assert "FAIL outer: outer_kernel [M=64,N=64,4w1s] on sm_120: no HMMA" in said and "1 refused" in said
    assert len(os.listdir(tmp_path / "isthmus" / "kernels")) == 2


def test_the_table_shows_only_constants_in_which_an_operation_differs():
    tiles = ("M=64,N=64,4w1s", "M=64,N=32,4w1s")
    table = gate.format_reports([Report("outer", "outer_kernel", tile, "sm_90") for tile in tiles])
    assert [line.split()[2] for line in table.splitlines()[1:3]] == ["N=64,4w1s", "N=32,4w1s"]


def test_nothing_to_compile_is_a_failure(monkeypatch):
    monkeypatch.setattr(gate, "shipped", lambda arch: [])
    assert gate.main([]) == 1


def test_an_unknown_kernel_is_named_with_the_known_ones(monkeypatch, capsys):
    monkeypatch.setattr(gate, "shipped", lambda arch: [OUTER])
    with pytest.raises(SystemExit) as stopped:
        gate.main(["--kernel", "inner"])
    assert stopped.value.code == 2
    assert "no kernel or operation inner; there are: outer outer_kernel" in capsys.readouterr().err


def test_the_command_passes_its_arguments_on(monkeypatch, capsys):
    monkeypatch.setattr(gate, "shipped", lambda arch: [OUTER])
    with pytest.raises(SystemExit):
        cli.main(["kernels", "check", "--kernel", "inner"])
    assert "isthmus kernels check: error: no kernel or operation inner" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["kernels"], ["kernels", "chek"], ["bench"], ["bench", "roter"]])
def test_an_incomplete_command_shows_its_usage(words, capsys):
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"usage: isthmus {words[0]} ")


LOOPS = """
$A:
    wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%f1, %f2}, %rd1, %rd2, p, 1, 1, 0, 0;
    wgmma.wait_group.sync.aligned 1;
    @%p1 bra $A;
$B:
    wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%f1, %f2}, {%r1, %r2, %r3, %r4}, %rd2, p, 1, 1, 0;
    wgmma.wait_group.sync.aligned WAITS;
    @%p1 bra $B;
"""


@pytest.mark.parametrize(("waits", "running"), [("1", 1), ("0", 0)])
def test_products_whose_registers_may_be_written_too_early_are_counted_loop_by_loop(waits, running):
    assert offline._running(LOOPS.replace("WAITS", waits)) == running
