"""`isthmus bench weights`: how fast a checkpoint is loaded, beside what its disk and the way to the GPU allow."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from bench.progress import Progress
from bench.report import number, write_json

if TYPE_CHECKING:
    import torch

    from engine.model.config import DeepSeekV4Config
    from engine.model.shard import Shard

_COPY_BYTES, _COPIES = 64 << 20, 32
_PROBES = 256  # places of the files that are asked whether the page cache has them

_EXAMPLES = """\
examples
  isthmus bench weights --model ./DeepSeek-V4-Flash --shard 0/4 --device cuda --json weights.json
  isthmus bench weights --model dsv4-tiny --device cpu

what is measured
  disk        the bytes that this rank needs, read as loading reads them and thrown away; the page cache is emptied of
              the checkpoint before. "cached" says how much of it stayed there all the same: what some file systems do
  copy        64 MiB from pinned memory to the GPU, again and again
  load        from the first header to a model that could run: read, checked, packed, built, on its device; the page
              cache emptied before. of bound: its rate over the slower of disk and copy
  in flight   staging buffers: all of the checkpoint that is ever in host memory
  peak        what host memory grew by at most while it loaded: anonymous memory of the process, looked at a hundred
              times a second, and staging where that is pinned, of which anonymous memory has nothing. (What is mapped
              from files when first used, such as CUDA's kernels, is not the checkpoint's.) On a CPU the model is in it
  samples     matrices of the loaded model whose values were compared with the files, read and dequantised another way
"""


def main(argv: Sequence[str], *, prog: str = "isthmus bench weights") -> int:
    """Run the benchmark: 0 well, 1 a sample differs, 2 wrong usage or a checkpoint that is refused."""
    args = _parser(prog).parse_args(argv)
    from engine.model.checkpoint import WeightsError

    try:
        report = measure(args, Progress(quiet=args.quiet))
    except (WeightsError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    show(report)
    if args.json:
        write_json(report, args.json)
    return 1 if report["samples"]["faults"] else 0


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return the report of one checkpoint and one rank's part of it."""
    import torch

    from bench.weight_samples import compare_samples
    from engine.model.config import load_config
    from engine.model.shard import Shard
    from kernels.bench import current_commit

    config, shard = load_config(args.model), Shard.parse(args.shard)
    device = torch.device(args.device)
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else platform.processor() or "CPU"
    paths = _weight_files(args.model)
    read_bytes, disk = _read_only(args, config, shard, paths, progress)
    copy = _copy_rate(device) if device.type == "cuda" else None
    load = _load(args, config, shard, paths, progress)
    bound = min(rate for rate in (disk["bytes_per_s"], copy) if rate is not None)
    progress.say(f"load: {load['seconds']:.2f} s; comparing samples")
    samples = compare_samples(args, config, shard, count=args.samples)
    return {
        "conditions": {
            "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "commit": current_commit(),
            "device": name,
            "torch": torch.__version__,
            "model": Path(args.model).resolve().name,
            "layers": config.num_hidden_layers,
            "shard": args.shard or "0/1",
            "dtype": args.dtype,
            "files": len(paths),
            "file_bytes": sum(path.stat().st_size for path in paths),
        },
        "read_bytes": read_bytes,
        "disk": disk,
        "copy_bytes_per_s": copy,
        "load": load | {"bytes_per_s": read_bytes / load["seconds"]},
        "of_bound": read_bytes / load["seconds"] / bound,
        "peak_over_in_flight": None if copy is None else load["peak_bytes"] / load["in_flight_bytes"],
        "samples": samples,
    }


def _loader(args: argparse.Namespace, config: DeepSeekV4Config, shard: Shard, say: Any) -> Any:
    import torch

    from engine.model.moe import keeps_packed
    from engine.model.weights import WeightLoader
    from engine.runner import DTYPES

    device = torch.device(args.device)
    return WeightLoader(
        args.model, config, dtype=DTYPES[args.dtype], device=device, keeps_packed=keeps_packed(device), shard=shard,
        progress=say,
    )  # fmt: skip


def _read_only(
    args: argparse.Namespace, config: DeepSeekV4Config, shard: Shard, paths: list[Path], progress: Progress
) -> tuple[int, dict[str, Any]]:
    """Return how many bytes this rank reads, and how fast they come when nothing is made of them."""
    cached = drop_cache(paths)
    reader = _loader(args, config, shard, lambda text: None).reader(progress.say)
    for _ in reader.parts(lambda unit, raw, tensors: None, on_device=False):
        pass
    stats = reader.stats
    rate = stats.read_bytes / stats.seconds
    progress.say(f"disk: {rate / 1e9:.2f} GB/s, {100 * cached:.0f} % of it was cached")
    return stats.read_bytes, {"seconds": stats.seconds, "bytes_per_s": rate, "cached": cached}


def _load(
    args: argparse.Namespace, config: DeepSeekV4Config, shard: Shard, paths: list[Path], progress: Progress
) -> dict[str, Any]:
    """Load and build the model as a rank does."""
    import torch

    from engine.model.model import DeepSeekV4

    device = torch.device(args.device)
    cached = drop_cache(paths)
    with _HostMemory() as memory:
        began = time.monotonic()
        loader = _loader(args, config, shard, progress.say)
        model = DeepSeekV4(shard.of(config), loader.parts(), index_hadamard=False, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.monotonic() - began
    del model
    pinned = loader.stats.staging_bytes if device.type == "cuda" else 0
    return {
        "seconds": seconds,
        "cached": cached,
        "in_flight_bytes": loader.stats.staging_bytes,
        "anonymous_growth_bytes": memory.growth("RssAnon"),
        "resident_growth_bytes": memory.growth("VmRSS"),
        "peak_bytes": memory.growth("RssAnon") + pinned,
    }


def drop_cache(paths: Iterable[Path]) -> float:
    """Ask the page cache to forget files; return the share of some places in them that it still has."""
    found = probes = 0
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what was not written yet is not forgotten
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size = path.stat().st_size
            each = max(1, _PROBES // 8)
            for at in range(each):
                probes += 1
                with contextlib.suppress(OSError):  # it would have to wait: not there
                    found += os.preadv(file.fileno(), [bytearray(1)], at * size // each, os.RWF_NOWAIT) == 1
    return found / max(1, probes)


def _weight_files(folder: str) -> list[Path]:
    from engine.model.config import shard_paths

    return shard_paths(folder)


def _copy_rate(device: torch.device) -> float:
    """Return bytes a second from pinned memory to the device."""
    import torch

    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target.copy_(source)
    torch.cuda.synchronize(device)
    began = time.monotonic()
    for _ in range(_COPIES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    return _COPIES * _COPY_BYTES / (time.monotonic() - began)


class _HostMemory:
    """What this process's memory grows by at most while the body runs, by the names of /proc/self/status."""

    _NAMES, _EVERY_S = ("RssAnon", "VmRSS"), 0.01

    def __enter__(self) -> _HostMemory:
        self._before = self._peak = self._read()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def growth(self, name: str) -> int:
        """Return bytes."""
        return self._peak[name] - self._before[name]

    def _watch(self) -> None:
        while not self._ended.wait(self._EVERY_S):
            now = self._read()
            self._peak = {name: max(self._peak[name], now[name]) for name in self._NAMES}

    def _read(self) -> dict[str, int]:
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[0][:-1] in self._NAMES}


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    conditions, load, disk, samples = (report[name] for name in ("conditions", "load", "disk", "samples"))
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{conditions['device']}, commit {conditions['commit']}, {conditions['date']}: rank {conditions['shard']}, "
        f"{conditions['layers']} layers, {conditions['file_bytes'] / 1e9:.2f} GB in {conditions['files']} files",
        markup=False,
    )
    table = Table(box=None, header_style="bold")
    for head in ("", "GB", "s", "GB/s", "cached"):
        table.add_column(head, justify="left" if not head else "right")
    size = report["read_bytes"] / 1e9
    copy, ratio = report["copy_bytes_per_s"], report["peak_over_in_flight"]
    table.add_row("disk", number(size, 2), *(number(disk["seconds"], 2), number(disk["bytes_per_s"] / 1e9, 2)),
                  f"{100 * disk['cached']:.0f}%")  # fmt: skip
    table.add_row("copy", "", "", number(None if copy is None else copy / 1e9, 2), "")
    table.add_row("load", number(size, 2), number(load["seconds"], 2), number(load["bytes_per_s"] / 1e9, 2),
                  f"{100 * load['cached']:.0f}%")  # fmt: skip
    console.print(table)
    console.print(
        f"of bound {100 * report['of_bound']:.0f}%; in flight {load['in_flight_bytes'] / 1e6:,.0f} MB, "
        f"peak {load['peak_bytes'] / 1e6:,.0f} MB ({'with the model' if ratio is None else f'{ratio:.2f} x'}); "
        f"{samples['compared']} samples, {samples['values']:,} values, {len(samples['faults'])} differ"
    )
    for fault in samples["faults"][:20]:
        console.print(f"  {fault}", markup=False)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder with config.json and safetensors files")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="(%(default)s)")
    parser.add_argument("--shard", default="", metavar="I/N", help="the part of rank I of N; default: all of it")
    parser.add_argument("--samples", type=int, default=50, help="matrices to compare with the files (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser
