"""Compile one variant of a kernel for a GPU that is not here, and read what the compiler made of it.

Triton's wheel holds ptxas, cuobjdump and nvdisasm; neither a driver nor torch takes part. Registers and spills come
from the very ptxas run that makes the binary, opcodes from its disassembly. `faults` says what keeps it from shipping.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.tiles import Variant

_TENSOR = re.compile(r"(?:H|Q|O|I|D|HG|QG|IG|UTC\w*)MMA\b")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
# On global memory, those whose result nobody reads included; ATOMS is on shared memory, REDUX on registers.
_ATOMIC = re.compile(r"(?:ATOM|ATOMG|RED|REDG|LDGMC|REDGMC|STGMC)\b")
_FLAGS = (r"LDG?\b.*\.STRONG\.SYS", r"STG?\b.*\.STRONG\.SYS")
_LEFT_IN_REGISTERS = re.compile(r"wgmma\.mma_async[^{;]*\{[^}]*\},\s*\{")
_LEFT_RUNNING = re.compile(r"wgmma\.wait_group\S*\s+[1-9]")
_LABEL, _JUMP = re.compile(r"\s*(\$\w+):"), re.compile(r"\bbra\S*\s+(\$\w+)")
_WARPGROUP = {"HMMA": ("HMMA", "HGMMA"), "QMMA": ("QMMA", "QGMMA")}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a multiprocessor offers: bytes of shared memory a block may take and all blocks share, warps, blocks.

    per_weight: lane instructions that issue in half the time in which memory delivers a weight of 4.5 bits: 128 lanes
    of 188 multiprocessors at 2.4 GHz against 1.6 TB/s. For sm_90 (132 at 1.98 GHz, 4.3 TB/s) that half would be 2.2;
    what is accepted there is memory and issue taking turns.
    """

    block_smem: int
    smem: int
    warps: int
    per_weight: float
    registers: int = 65536
    blocks: int = 32
    reserved_smem: int = 1024  # by the system, for every block


LIMITS = {"sm_120": Limits(101_376, 102_400, 48, 10.1), "sm_90": Limits(232_448, 233_472, 64, 5.5)}


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of one variant on one target. Counts are static: instructions in the binary, each once.

    smem: bytes a block needs.   spill: bytes of spill stores and loads.   tensor: opcode -> count.
    narrow: global loads of one byte.   wide: of sixteen.   loop: instructions of the longest loop that holds tensor
    instructions (any loop if there are none), 0 without one.   per_byte: lane instructions per byte of device memory,
    of that loop if there is one, else of the kernel; None where the variant doesn't say its bytes.
    per_weight: lane instructions per packed weight, of the innermost loop that does the most around each product.
    running: warp group products with their left operand in registers, in a loop that leaves products to run on.
    atomics: on device memory, and multicasts.   flags: loads and stores of system scope, at least one of each.
    resident: blocks a multiprocessor holds at a time.   faults: why it may not ship; empty if it may.
    """

    op: str
    kernel: str
    tile: str
    arch: str
    registers: int = 0
    spill: int = 0
    stack: int = 0
    smem: int = 0
    instructions: int = 0
    tensor: dict[str, int] = dataclasses.field(default_factory=dict)
    barriers: int = 0
    narrow: int = 0
    wide: int = 0
    loop: int = 0
    per_byte: float | None = None
    per_weight: float | None = None
    running: int = 0
    atomics: int = 0
    flags: int = 0
    resident: int = 0
    seconds: float = 0.0
    faults: tuple[str, ...] = ()
    cached: bool = False


def tile_name(variant: Variant) -> str:
    """Return a variant's constants and launch parameters in one word, as in "BLOCK_H=16,lse=-,8w2s" (no lse)."""
    values = {name: int(v) if isinstance(v, bool) else v for name, v in variant.constants.items()}
    parts = [f"{name}={'-' if value is None else value}" for name, value in values.items()]
    limit = f"r{variant.maxnreg}" if variant.maxnreg else ""
    return ",".join([*parts, f"{variant.num_warps}w{variant.num_stages}s{limit}"])


def compile_variant(variant: Variant, arch: str, *, dump: Path | None = None) -> Report:
    """Compile `variant` for `arch`; write ptx, ttgir and sass into the folder `dump` if given.

    Works in the current process and changes Triton's knobs: call it in a process made for it. Raises ValueError for a
    signature that does not fit the kernel, and what Triton raises.
    """
    with tempfile.TemporaryDirectory(prefix="isthmus-kernels-") as scratch:
        triton.knobs.cache.dir = scratch  # nothing found there: ptxas must run, and its log is wanted
        triton.knobs.nvidia.dump_ptxas_log = True
        log = io.StringIO()
        begin = time.perf_counter()
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(
                _source(variant), target=GPUTarget("cuda", int(arch.removeprefix("sm_")), 32), options=_options(variant)
            )
        seconds = time.perf_counter() - begin
        sass = _disassemble(compiled.asm["cubin"], Path(scratch))
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        tile = tile_name(variant)  # may be longer than a file's name
        stem = f"{re.sub(r'[^A-Za-z0-9]+', '_', variant.op)}.{zlib.crc32(tile.encode()):08x}.{arch}"
        for suffix, text in (("ptx", compiled.asm["ptx"]), ("ttgir", compiled.asm["ttgir"]), ("sass", sass)):
            (dump / f"{stem}.{suffix}").write_text(f"// {variant.kernel.__name__} {tile}\n{text}")
    report = _report(variant, arch, log.getvalue(), sass, compiled.metadata.shared, seconds)
    report = dataclasses.replace(report, running=_running(compiled.asm["ptx"]))
    return dataclasses.replace(report, faults=tuple(_faults(report, variant)))


def _source(variant: Variant) -> ASTSource:
    names = list(variant.kernel.arg_names)
    constants = {**variant.constants, **dict.fromkeys(variant.ones, 1)}
    given = {**variant.signature, **dict.fromkeys(constants, "constexpr")}
    missing, unknown = set(names) - set(given), set(given) | set(variant.unaligned)
    if missing or unknown - set(names):
        raise ValueError(
            f"variant of {variant.op}: kernel {variant.kernel.__name__} has arguments without a type or value "
            f"{sorted(missing)}, and the variant names arguments that it lacks {sorted(unknown - set(names))}"
        )
    aligned = [
        i
        for i, name in enumerate(names)
        if (given[name].startswith("*") or given[name] in ("i32", "i64")) and name not in variant.unaligned
    ]
    return ASTSource(
        fn=variant.kernel,
        signature={name: given[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )


def _options(variant: Variant) -> dict[str, Any]:
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "maxnreg": variant.maxnreg}
    return {name: value for name, value in options.items() if value is not None}


def _disassemble(cubin: bytes, folder: Path) -> str:
    tool = Path(triton.knobs.nvidia.cuobjdump.path)
    (folder / "kernel.cubin").write_bytes(cubin)
    path = f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # cuobjdump calls nvdisasm
    command = [str(tool), "-sass", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path}, check=False)
    if done.returncode or "/*0000*/" not in done.stdout:
        raise RuntimeError(f"{' '.join(command)} gave no SASS: {done.stderr.strip()[-500:]}")
    return done.stdout


def _report(variant: Variant, arch: str, log: str, sass: str, shared: int, seconds: float) -> Report:
    used = re.findall(r"Used (\d+) registers", log)
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not used or not spilled:
        raise RuntimeError(f"ptxas said neither registers nor spills; Triton {triton.__version__} printed: {log!r}")
    static = [int(size) for size in re.findall(r"(\d+) bytes smem", log)]
    code = [
        (int(found[1], 16), found[2], found[3])
        for found in map(_INSTRUCTION.match, sass.splitlines())
        if found and found[2] != "NOP"
    ]
    opcodes = Counter(opcode for _, opcode, _ in code)
    loop = _longest_loop(code)
    lanes = 32 * variant.num_warps * (len(loop) or len(code))
    report = Report(
        op=variant.op,
        kernel=variant.kernel.__name__,
        tile=tile_name(variant),
        arch=arch,
        registers=max(map(int, used)),
        spill=sum(int(stores) + int(loads) for _, stores, loads in spilled),
        stack=sum(int(stack) for stack, _, _ in spilled),
        smem=shared + sum(static),
        instructions=len(code),
        tensor={opcode: n for opcode, n in sorted(opcodes.items()) if _TENSOR.match(opcode)},
        barriers=sum(n for opcode, n in opcodes.items() if opcode.startswith("BAR.")),
        narrow=sum(n for opcode, n in opcodes.items() if re.match(r"LDG\b.*\.[US]8\b", opcode)),
        wide=sum(n for opcode, n in opcodes.items() if re.match(r"(LDG|LDGSTS)\b.*\.128\b", opcode)),
        loop=len(loop),
        per_byte=round(lanes / variant.bytes_per_program, 2) if variant.bytes_per_program else None,
        per_weight=_per_weight(code) if variant.has_packed_weights else None,
        atomics=sum(n for opcode, n in opcodes.items() if _ATOMIC.match(opcode)),
        flags=min(sum(n for opcode, n in opcodes.items() if re.match(kind, opcode)) for kind in _FLAGS),
        seconds=round(seconds, 2),
    )
    return dataclasses.replace(report, resident=_resident(report, variant.num_warps))


def _running(ptx: str) -> int:
    """Return the products that may read registers of their left operand after these have been written anew.

    A wgmma reads its operands until it has been waited for. In a pipelined loop Triton leaves the last ones to run on
    into the next iteration, and only watches over operands in shared memory.
    """
    lines, labels, most = ptx.splitlines(), dict[str, int](), 0
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = number
        elif (jump := _JUMP.search(line)) and jump[1] in labels:
            loop = "\n".join(lines[labels[jump[1]] : number])
            if _LEFT_RUNNING.search(loop):
                most = max(most, len(_LEFT_IN_REGISTERS.findall(loop)))
    return most


def _loops(code: list[tuple[int, str, str]]) -> list[tuple[int, int]]:
    """Return the first and last address of every loop."""
    found = []
    for at, opcode, operands in code:
        target = re.search(r"0x([0-9a-f]+)", operands) if opcode.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            found.append((int(target[1], 16), at))
    return found


def _body(code: list[tuple[int, str, str]], loop: tuple[int, int]) -> list[str]:
    return [name for place, name, _ in code if loop[0] <= place <= loop[1]]


def _longest_loop(code: list[tuple[int, str, str]]) -> list[str]:
    loops = [_body(code, loop) for loop in _loops(code)]
    with_tensor = [body for body in loops if any(map(_TENSOR.match, body))]
    return max(with_tensor or loops, key=len, default=[])


def _per_weight(code: list[tuple[int, str, str]]) -> float | None:
    """Return lane instructions per weight of the innermost loop that takes the most.

    An HGMMA multiplies each warp's 16 x 16 weights with all columns, an HMMA with 8 columns. A weight is multiplied
    once with its scale, two at a time by an HMUL2 of every lane: so many times do products repeat it.
    """
    loops = _loops(code)
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    costs = []
    for body in (_body(code, loop) for loop in inner):
        wide = sum(name.startswith("HGMMA") for name in body)
        narrow = sum(bool(_TENSOR.match(name)) for name in body) - wide
        scaled = sum(name.startswith("HMUL2") for name in body)
        if wide or narrow:
            repeats = max(1, round(4 * narrow / scaled)) if scaled else 1
            costs.append(32 * len(body) / (16 * 16 * (wide + narrow / repeats)))
    return round(max(costs), 2) if costs else None


def _resident(report: Report, num_warps: int) -> int:
    limits = LIMITS[report.arch]
    registers = -(-report.registers * 32 // 256) * 256 * num_warps  # handed out to a warp in units of 256
    return min(
        limits.blocks,
        limits.warps // num_warps,
        limits.registers // registers,
        limits.smem // (report.smem + limits.reserved_smem),
    )


def _faults(report: Report, variant: Variant) -> list[str]:
    limits, faults = LIMITS[report.arch], []
    if report.spill:
        faults.append(f"{report.spill} B of spills: take a smaller tile or more warps")
    if report.smem > limits.block_smem:
        faults.append(f"{report.smem:,} B of shared memory, a block has {limits.block_smem:,}: fewer stages or columns")
    elif not report.resident:
        faults.append(f"{report.registers} registers in {variant.num_warps} warps: no multiprocessor holds a block")
    if report.running:
        faults.append(
            f"{report.running} products with their left operand in registers, in a loop that does not wait for them: "
            "use each one's sums in the iteration that makes them, or load the operand to shared memory"
        )
    if variant.has_peers and report.atomics:
        faults.append(f"{report.atomics} atomics: PCIe carries none to a peer; use flags of st.release and ld.acquire")
    if variant.has_peers and not report.flags:
        faults.append("no load or no store of system scope: peers would not see what it writes, or it not what they do")
    if report.per_weight is not None and report.per_weight > limits.per_weight:
        faults.append(
            f"{report.per_weight} instructions a weight: at most {limits.per_weight}, or issue limits the loop"
        )
    allowed: set[str] = set()
    for wanted in variant.tensor_ops:
        accepted = _WARPGROUP.get(wanted, (wanted,)) if report.arch == "sm_90" else (wanted,)
        allowed.update(accepted)
        if not any(opcode.startswith(accepted) for opcode in report.tensor):
            faults.append(f"no {' or '.join(accepted)}: operand types, or a tile too small for the tensor cores?")
    others = [opcode for opcode in report.tensor if not opcode.startswith(tuple(allowed) or ("-",))]
    if others:
        faults.append(f"{', '.join(others)} beside the declared {list(variant.tensor_ops)}: an emulated product?")
    return faults
