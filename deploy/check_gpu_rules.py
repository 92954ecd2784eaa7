"""What the facts of GPUs and their driver mean for a cluster; see deploy.check_rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deploy.check_facts import Cuda, Host
from deploy.check_rules import GIB, Finding
from deploy.placement import Placement
from engine.memory_plan import MemoryPlan
from engine.numa import format_cpu_list
from kernels.table import counted

# what kernels are cut and compiled for; the least that has FP8 tensor instructions
_SHIPPED = ((12, 0), (9, 0))
_LEAST = (8, 9)
_FREE_SHARE = 0.97  # of a card: the driver and an idle context take the rest


def driver(cuda: Cuda) -> list[Finding]:
    """Whether CUDA answers, and serves what torch was built for."""
    if cuda.error:
        remedy = "run nvidia-smi: if it fails too, reinstall the driver or restart; else reinstall torch"
        return [Finding("driver", "problem", f"torch can't be asked for GPUs: {cuda.error}", remedy)]
    if not cuda.torch_cuda:
        seen = "torch is a CPU build"
        return [Finding("driver", "problem", seen, "pip install '.[gpu]' from a wheel index of your CUDA version")]
    if not cuda.driver_cuda:
        seen = "libcuda is not here" if not cuda.driver else f"driver {cuda.driver} is loaded, but libcuda is not here"
        return [Finding("driver", "problem", seen, "install the NVIDIA driver; in a container: --gpus all")]
    seen = (
        f"driver {cuda.driver or '(version not told)'} for CUDA {_cuda(cuda.driver_cuda)}, torch for {cuda.torch_cuda}"
    )
    if cuda.driver_cuda // 1000 < int(cuda.torch_cuda.split(".")[0]):
        return [Finding("driver", "problem", seen, f"install a driver for CUDA {cuda.torch_cuda} or later")]
    if not cuda.gpus:
        return [Finding("driver", "problem", f"{seen}; no GPU answers", "see `nvidia-smi` and `dmesg` for Xid errors")]
    return [Finding("driver", "ok", seen)]


def architecture(cuda: Cuda, gpus: Iterable[int]) -> list[Finding]:
    """gpus: CUDA indices in use."""
    findings = []
    for (name, capability), indices in _alike(cuda, gpus).items():
        seen = f"GPUs {format_cpu_list(indices)}: {name}, sm_{capability[0]}{capability[1]}"
        if capability < _LEAST:
            findings.append(
                Finding("GPUs", "problem", f"{seen}: no FP8", "take cards of sm_89 or later, or device: cpu")
            )
        elif capability not in _SHIPPED:
            remedy = "expect other speeds; `isthmus kernels check` says what ships"
            findings.append(Finding("GPUs", "warning", f"{seen}: kernels are cut for sm_120 and sm_90", remedy))
        else:
            findings.append(Finding("GPUs", "ok", seen))
    if len(findings) > 1:
        seen = "GPUs of several kinds: a group is as fast as its slowest card"
        findings.append(Finding("GPUs", "warning", seen, "put like cards into one group"))
    return findings


def gpu_memory(cuda: Cuda, placements: Sequence[Placement], plans: Sequence[MemoryPlan]) -> list[Finding]:
    """Whether the cards have what was planned, and nobody else holds it."""
    findings = []
    for placement, plan in zip(placements, plans, strict=True):
        name = placement.config.worker_id
        for index in placement.gpus:
            if index >= len(cuda.gpus):
                seen = f"{name}: GPU {index} is on the PCI bus, but CUDA shows {counted(len(cuda.gpus), 'GPU')}"
                findings.append(Finding("GPU memory", "problem", seen, "see `nvidia-smi` and `dmesg` for Xid errors"))
                continue
            gpu = cuda.gpus[index]
            free, total, planned = (n / GIB for n in (gpu.free_bytes, gpu.total_bytes, plan.device_bytes))
            if plan.device_bytes > gpu.total_bytes:
                seen = f"{name}: GPU {index} has {total:.2f} GiB, planned are {planned:.2f}"
                findings.append(Finding("GPU memory", "problem", seen, f"gpu_memory_gib: {int(total * 10) / 10}"))
            elif gpu.free_bytes < _FREE_SHARE * min(plan.device_bytes, gpu.total_bytes):
                seen = f"{name}: GPU {index} has {free:.1f} of {total:.1f} GiB free"
                remedy = "end what nvidia-smi shows there, or lower gpu_memory_gib"
                findings.append(Finding("GPU memory", "problem", seen, remedy))
        if placement.gpus and not any(name in finding.seen for finding in findings):
            seen = f"{name}: every GPU has the {plan.device_bytes / GIB:.2f} GiB that are planned"
            findings.append(Finding("GPU memory", "ok", seen))
    return findings


def peers(cuda: Cuda, placements: Sequence[Placement]) -> list[Finding]:
    """Whether the GPUs of a group reach each other, and prefill's those of decode."""
    findings = []
    remedy = "switch off PCIe ACS, and the IOMMU or set iommu=pt; `nvidia-smi topo -p2p w` shows the pairs"
    users = [placement for placement in placements if placement.gpus and max(placement.gpus) < len(cuda.peers)]
    for placement in users:
        cut = _cut(cuda, placement.gpus, placement.gpus)
        name = placement.config.worker_id
        if cut:
            seen = f"{name}: no peer-to-peer between GPUs {_pairs(cut)}: exchanges go through host memory"
            findings.append(Finding("P2P", "warning", seen, remedy))
        elif len(placement.gpus) > 1:
            seen = f"{name}: GPUs {format_cpu_list(placement.gpus)} reach each other's memory"
            findings.append(Finding("P2P", "ok", seen))
    for prefill in (placement for placement in users if placement.config.role == "prefill"):
        for decode in (placement for placement in users if placement.config.role == "decode"):
            names = f"{prefill.config.worker_id} -> {decode.config.worker_id}"
            if cut := _cut(cuda, prefill.gpus, decode.gpus):
                seen = f"{names}: no peer-to-peer between GPUs {_pairs(cut)}: the cache goes through pinned host memory"
                findings.append(Finding("P2P", "warning", seen, f"nothing with transport: auto; or {remedy}"))
            else:
                findings.append(Finding("P2P", "ok", f"{names}: every GPU reaches every other"))
    return findings


def kernel_cache(host: Host) -> list[Finding]:
    """Where Triton keeps compiled kernels: without it every start compiles them all, for minutes."""
    if not host.kernel_cache_writable:
        seen = f"compiled kernels can't be kept in {host.kernel_cache}: every start compiles them anew"
        return [Finding("kernels", "warning", seen, "set TRITON_CACHE_DIR to a folder that stays and may be written")]
    if not host.kernel_cache_entries:
        seen = f"{host.kernel_cache} is empty: the first start compiles every kernel, which takes minutes"
        return [Finding("kernels", "ok", seen)]
    return [Finding("kernels", "ok", f"{counted(host.kernel_cache_entries, 'compiled kernel')} in {host.kernel_cache}")]


def _alike(cuda: Cuda, gpus: Iterable[int]) -> dict[tuple[str, tuple[int, int]], list[int]]:
    found: dict[tuple[str, tuple[int, int]], list[int]] = {}
    for index in gpus:
        if index < len(cuda.gpus):
            found.setdefault((cuda.gpus[index].name, cuda.gpus[index].capability), []).append(index)
    return found


def _cut(cuda: Cuda, left: Iterable[int], right: Iterable[int]) -> list[tuple[int, int]]:
    pairs = {(min(a, b), max(a, b)) for a in left for b in right if a != b}
    return sorted((a, b) for a, b in pairs if b not in cuda.peers[a] or a not in cuda.peers[b])


def _pairs(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:4])
    return shown + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else "")


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
