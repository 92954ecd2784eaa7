"""What `isthmus check` looks at: facts of this host, read once. What they mean is said in deploy.check_rules.

Nothing here raises because of what it finds, or does not find: what can't be read is None, "" or an `error`. CUDA is
asked in a process of its own, since a driver that hangs or crashes is among the things to be found.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from engine.model.config import shard_paths
from engine.numa import parse_cpu_list
from kv_transfer.memory_nodes import count_fresh_pages

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
LIBRARIES = ("torch", "triton", "nixl-cu13", "ray")
_PROBE_S = 120.0

# runs alone, prints one JSON object; torch is imported here and nowhere else
_ASK_CUDA = """
import ctypes, json, torch
found = {"torch_cuda": torch.version.cuda or "", "gpus": [], "peers": [], "driver_cuda": 0}
try:
    version = ctypes.c_int()
    if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
        found["driver_cuda"] = version.value
except OSError:
    pass
if torch.cuda.is_available():
    count = torch.cuda.device_count()
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        capability, (free, total) = [gpu.major, gpu.minor], torch.cuda.mem_get_info(index)
        found["gpus"].append(dict(name=gpu.name, capability=capability, free_bytes=free, total_bytes=total))
        found["peers"].append([b for b in range(count) if b != index and torch.cuda.can_device_access_peer(index, b)])
print(json.dumps(found))
"""
# two siblings, as two ranks are: UCX's cma lane needs that one may write into the other
_BUFFER_OWNER = """
import ctypes, sys
buffer = ctypes.create_string_buffer(16)
print(ctypes.addressof(buffer), flush=True)
sys.stdin.read()
"""
_WRITER = """
import ctypes, os, sys
class Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))
libc, own = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(b"x" * 16)
here, there = Piece(ctypes.addressof(own), 16), Piece(int(sys.argv[2]), 16)
wrote = libc.process_vm_writev(int(sys.argv[1]), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
print("" if wrote == 16 else os.strerror(ctypes.get_errno()))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as CUDA sees it, by PCI address. capability: (12, 0) is sm_120."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Cuda:
    """driver: version of the kernel module, "" without one.   driver_cuda: newest it serves, 13000 is 13.0; 0: none.

    torch_cuda: that torch was built for, "" for a CPU build.   peers: by GPU, those whose memory it reaches.
    error: why nothing else is known.
    """

    driver: str = ""
    driver_cuda: int = 0
    torch_cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    peers: tuple[frozenset[int], ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """Limits are soft ones; -1: none.

    allowed_nodes: nodes whose memory this process may have; None: not told.
    ptrace_scope: None where the kernel has no Yama.   cma_error: why one process can't write into its sibling; "".
    page_error: why the kernel does not tell where pages lie; "".   kernel_cache: where Triton keeps compiled kernels.
    versions: of LIBRARIES, "" for one that is missing.
    """

    memory_bytes: int
    available_bytes: int
    shm_bytes: int
    open_files: int
    locked_bytes: int
    allowed_cpus: frozenset[int]
    allowed_nodes: frozenset[int] | None
    ptrace_scope: int | None = None
    cma_error: str = ""
    page_error: str = ""
    numactl: str = ""
    numa_balancing: bool = False
    kernel_cache: Path = Path()
    kernel_cache_entries: int = 0
    kernel_cache_writable: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """unreadable: names of weight files that this user may not read.   cut: of those that are not whole."""

    path: str
    num_files: int
    num_bytes: int
    unreadable: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    has_tokenizer: bool = True


def read_model_folder(folder: str) -> ModelFolder:
    """Look at the weight files of a complete folder. Raises what shard_paths raises of another."""
    paths = shard_paths(folder)
    return ModelFolder(
        path=folder,
        num_files=len(paths),
        num_bytes=sum(path.stat().st_size for path in paths),
        unreadable=tuple(path.name for path in paths if not os.access(path, os.R_OK)),
        cut=tuple(path.name for path in paths if os.access(path, os.R_OK) and not _is_whole(path)),
        has_tokenizer=(Path(folder) / "tokenizer.json").is_file(),
    )


def _is_whole(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says: not half a download, nor a Git LFS pointer."""
    try:
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if begin > size:
                return False
            tensors = json.loads(file.read(begin - 8))
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        return bool(size == begin + max(ends, default=0))
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return False


def read_host(environ: Mapping[str, str], *, proc: Path = PROC, shared_memory: Path = SHARED_MEMORY) -> Host:
    """Read what the kernel and the environment say of this host and this user."""
    memory = psutil.virtual_memory()
    nodes = _status_line(proc, "Mems_allowed_list")
    cache = Path(environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    scope = _read(proc / "sys/kernel/yama/ptrace_scope")
    return Host(
        memory_bytes=memory.total,
        available_bytes=memory.available,
        shm_bytes=shutil.disk_usage(shared_memory).free if shared_memory.is_dir() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        allowed_cpus=frozenset(os.sched_getaffinity(0)),
        allowed_nodes=frozenset(parse_cpu_list(nodes)) if nodes else None,
        ptrace_scope=int(scope) if scope else None,
        cma_error=_try_cma(),
        page_error=count_fresh_pages(1).error,
        numactl=shutil.which("numactl", path=environ.get("PATH")) or "",
        numa_balancing=_read(proc / "sys/kernel/numa_balancing") not in ("", "0"),
        kernel_cache=cache,
        kernel_cache_entries=sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0,
        kernel_cache_writable=os.access(nearest, os.W_OK),
        environ={name: value for name, value in environ.items() if name.startswith(("UCX_", "CUDA_", "NCCL_"))},
        versions={name: _version(name) for name in LIBRARIES},
    )


def read_cuda(environ: Mapping[str, str], *, proc: Path = PROC) -> Cuda:
    """Ask driver and torch for the GPUs, all of them and in PCI order; takes some seconds."""
    driver = next((word for word in _read(proc / "driver/nvidia/version").split() if _is_version(word)), "")
    # the whole machine's: `up` chooses among all of them
    asked = {name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    asked["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    text, error = _run([sys.executable, "-c", _ASK_CUDA], asked, timeout_s=_PROBE_S)
    if error:
        return Cuda(driver=driver, error=error)
    return cuda_of(driver, text)


def cuda_of(driver: str, text: str) -> Cuda:
    """Return what the probe printed."""
    found = json.loads(text.strip().splitlines()[-1])
    return Cuda(
        driver=driver,
        driver_cuda=found["driver_cuda"],
        torch_cuda=found["torch_cuda"],
        gpus=tuple(Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in found["gpus"]),
        peers=tuple(frozenset(peers) for peers in found["peers"]),
    )


def requirements() -> dict[str, str]:
    """Return the version ranges that this installation of Isthmus asks for, of LIBRARIES."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("isthmus") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    wanted = [Requirement(line) for line in lines if "extra ==" not in line]
    return {each.name: str(each.specifier) for each in wanted if each.name in LIBRARIES}


def _try_cma() -> str:
    """Let one process write into its sibling; return "" or why it could not."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _BUFFER_OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            assert owner.stdout is not None
            address = owner.stdout.readline().strip()
            command = [sys.executable, "-S", "-c", _WRITER, str(owner.pid), address]
            text, error = _run(command, os.environ, timeout_s=20)
            return error or text.strip()
        finally:
            owner.kill()


def _run(command: list[str], environ: Mapping[str, str], *, timeout_s: float) -> tuple[str, str]:
    """Return what a command printed, and "" or why it failed."""
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {timeout_s:g} s"
    except OSError as error:
        return "", str(error)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        return "", " ".join([f"exit code {done.returncode}", *last])
    return done.stdout, ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_version(word: str) -> bool:
    return "." in word and all(part.isdigit() for part in word.split("."))


def _status_line(proc: Path, name: str) -> str:
    lines = [line.split(":", 1) for line in _read(proc / "self/status").splitlines()]
    return next((line[1].strip() for line in lines if line[0] == name), "")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
