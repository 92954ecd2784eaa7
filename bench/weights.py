"""`isthmus bench weights`: how fast a checkpoint is loaded, beside what its disk and the way to the GPU allow."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.page_cache import cached_share, drop_cache
from bench.progress import Progress
from bench.report import write_json
from bench.weights_table import show

if TYPE_CHECKING:
    import torch

    from engine.model.config import DeepSeekV4Config
    from engine.model.parts import LoadStats, PartReader, WeightPart
    from engine.model.shard import Shard

_COPY_BYTES, _COPIES = 64 << 20, 32
_FIRST_LAYERS = 5  # or four, and what is of no layer: of each kind at least one

_EXAMPLES = """\
examples
  isthmus bench weights --model ./DeepSeek-V4-Flash --shard 0/4 --device cuda --json weights.json
  isthmus bench weights --model ./DeepSeek-V4-Flash --shard 0/4 --device cuda --weight-cache /data --warm
  isthmus bench weights --model dsv4-tiny --device cpu

what is measured
  disk        the bytes that this rank needs, read as loading reads them and thrown away; the page cache is emptied of
              the checkpoint before. "cached" says how much of it stayed there all the same: what some file systems do
  copy        64 MiB from pinned memory to the GPU, again and again
  load        from the first header to a model that could run: read, checked, packed, built, on its device; the page
              cache emptied before. of bound: its rate over the slower of disk and copy
  warm        with --warm: the same once more, the page cache left as loading has left it: what a faster disk would give
  cache       with --weight-cache, as workers have it: the same once more, writing the packed form into a new folder
              below that one, and how much longer that takes (page cache emptied before); then, read from there, disk
              and load as above. The folder is removed at the end; it takes as much as the weights take of the GPU
  in flight   staging buffers: all of the checkpoint that is ever in host memory
  peak        what host memory grew by at most while it loaded: anonymous memory of the process, looked at a hundred
              times a second, and staging where that is pinned, of which anonymous memory has nothing. On a CPU the
              model is in it
  once        what the first layers, loaded before, left with the process: on a GPU the code of kernels, which CUDA
              loads when they first run and keeps; the same for checkpoints of all sizes
  samples     matrices of the loaded model whose values were compared with the files, read and dequantised another way
"""


def main(argv: Sequence[str], *, prog: str = "isthmus bench weights") -> int:
    """Run the benchmark: 0 well, 1 a sample differs, 2 wrong usage or a checkpoint that is refused."""
    args = _parser(prog).parse_args(argv)
    from engine.model.checkpoint import WeightsError

    try:
        report = measure(args, Progress(quiet=args.quiet))
    except (WeightsError, ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    show(report)
    if args.json:
        write_json(report, args.json)
    samples = [report["samples"], *([report["cache"]["samples"]] if report["cache"] else [])]
    return 1 if any(each["faults"] for each in samples) else 0


class _Run(NamedTuple):
    """What is loaded."""

    args: argparse.Namespace
    config: DeepSeekV4Config
    shard: Shard
    device: torch.device
    progress: Progress
    said: list[str]  # while parts were taken

    def parts(self, cache: str = "") -> Generator[WeightPart, None, None]:
        """Yield the weights as a worker's rank takes them. cache: see read_weights."""
        from engine.model.moe import keeps_packed
        from engine.model.weight_cache import read_weights
        from engine.runner import DTYPES

        return read_weights(
            self.args.model, self.config, dtype=DTYPES[self.args.dtype], device=self.device,
            keeps_packed=keeps_packed(self.device), shard=self.shard, progress=self._say, cache=cache,
        )  # fmt: skip

    def reader(self) -> PartReader:
        """Return what reads the checkpoint's bytes that this rank needs."""
        from engine.model.moe import keeps_packed
        from engine.model.weights import WeightLoader
        from engine.runner import DTYPES

        loader = WeightLoader(
            self.args.model, self.config, dtype=DTYPES[self.args.dtype], device=self.device,
            keeps_packed=keeps_packed(self.device), shard=self.shard,
        )  # fmt: skip
        return loader.reader(self.progress.say)

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.progress.say(text)


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return the report of one checkpoint and one rank's part of it. Raises ValueError for what can't be measured."""
    import torch

    from bench.weight_samples import compare_samples
    from engine.model.config import load_config, shard_paths
    from engine.model.shard import Shard
    from kernels.bench import current_commit

    if args.samples < 0:
        raise ValueError(f"--samples {args.samples}: wanted 0 or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here; use --device cpu")
    run = _Run(args, load_config(args.model), Shard.parse(args.shard), torch.device(args.device), progress, [])
    on_gpu = run.device.type == "cuda"
    paths = shard_paths(args.model)
    stats, disk = _read_only(run, run.reader(), paths)
    copy = _copy_rate(run.device) if on_gpu else None
    once = _load_first_layers(run)
    load = _load(run, stats, paths)
    warm = _load(run, stats, paths, is_cold=False) if args.warm else None
    cache = _weight_cache(run, stats, paths, load["seconds"], copy) if args.weight_cache else None
    progress.say(f"load: {load['seconds']:.2f} s; comparing samples")
    samples = compare_samples(run.parts(), args, run.config, run.shard)
    return {
        "conditions": {
            "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "commit": current_commit(),
            "device": torch.cuda.get_device_properties(run.device).name if on_gpu else platform.processor() or "CPU",
            "torch": torch.__version__,
            "model": Path(args.model).resolve().name,
            "layers": run.config.num_hidden_layers,
            "shard": args.shard or "0/1",
            "dtype": args.dtype,
            "files": len(paths),
            "file_bytes": sum(path.stat().st_size for path in paths),
        },
        "read_bytes": stats.read_bytes,
        "disk": disk,
        "copy_bytes_per_s": copy,
        "load": load,
        "of_bound": _of_bound(load, disk, copy),
        "peak_over_in_flight": None if copy is None else load["peak_bytes"] / load["in_flight_bytes"],
        "once_bytes": once,
        "warm": warm,
        "cache": cache,
        "samples": samples,
    }


def _of_bound(load: dict[str, Any], disk: dict[str, Any], copy: float | None) -> float:
    bound = min(rate for rate in (disk["bytes_per_s"], copy) if rate is not None)
    return float(load["bytes_per_s"] / bound)


def _read_only(run: _Run, reader: PartReader, paths: list[Path]) -> tuple[LoadStats, dict[str, Any]]:
    """Return how many bytes this rank reads, and how fast they come when nothing is made of them."""
    cached = drop_cache(paths)
    for _ in reader.parts(lambda unit, raw, tensors: None, on_device=False):
        pass
    stats = reader.stats
    rate = stats.read_bytes / stats.seconds
    run.progress.say(f"disk: {rate / 1e9:.2f} GB/s, {100 * cached:.0f} % of it was cached")
    return stats, {"seconds": stats.seconds, "bytes_per_s": rate, "cached": cached}


def _load_first_layers(run: _Run) -> int:
    """Load a layer of each kind and let go of it; return the bytes of anonymous memory that it took."""
    from engine.model.group import Alone
    from engine.model.model import Layer

    config = run.shard.of(run.config)
    with _HostMemory() as memory, contextlib.closing(run.parts()) as parts:
        for number, part in itertools.islice(parts, _FIRST_LAYERS):
            if number is not None:
                Layer(part, number, config, use_hadamard=False, group=Alone())
            part.clear()
    _let_go(run.device)
    return memory.growth("RssAnon")


def _let_go(device: torch.device) -> None:
    """Give memory back, so that what is loaded next begins as this did."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _build(run: _Run, cache: str) -> float:
    """Load and build the model as a rank does, and let go of it; return seconds until it could run."""
    import torch

    from engine.model.model import DeepSeekV4

    began = time.monotonic()
    model = DeepSeekV4(run.shard.of(run.config), run.parts(cache), index_hadamard=False, device=run.device)
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    seconds = time.monotonic() - began
    del model
    _let_go(run.device)
    return seconds


def _load(run: _Run, stats: LoadStats, paths: list[Path], *, is_cold: bool = True, cache: str = "") -> dict[str, Any]:
    """Load the model; return seconds, bytes a second and memory.

    stats, paths: of what is read.   is_cold: empty the page cache of it before.   cache: as read_weights has it.
    """
    cached = drop_cache(paths) if is_cold else cached_share(paths)
    with _HostMemory() as memory:
        seconds = _build(run, cache)
    pinned = stats.staging_bytes if run.device.type == "cuda" else 0
    return {
        "seconds": seconds,
        "bytes_per_s": stats.read_bytes / seconds,
        "cached": cached,
        "in_flight_bytes": stats.staging_bytes,
        "anonymous_growth_bytes": memory.growth("RssAnon"),
        "resident_growth_bytes": memory.growth("VmRSS"),
        "peak_bytes": memory.growth("RssAnon") + pinned,
    }


def _weight_cache(
    run: _Run, stats: LoadStats, paths: list[Path], load_seconds: float, copy: float | None
) -> dict[str, Any]:
    """Measure keeping the packed form, and loading from it, in a folder that is removed again.

    stats, paths: of the checkpoint.   load_seconds: that it takes to load without keeping.
    """
    from bench.weight_samples import compare_samples
    from engine.model.weight_cache import cache_files, cache_reader

    Path(run.args.weight_cache).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-", dir=run.args.weight_cache) as folder:
        keeping = _load(run, stats, paths, cache=folder)
        kept = [found for found in Path(folder).iterdir() if not found.name.startswith(".")]
        if not kept:
            why = next((text for text in run.said if "not kept" in text), "weights: nothing was kept")
            raise ValueError(f"--weight-cache {run.args.weight_cache}: {why}")
        files = cache_files(kept[0])
        from_cache, disk = _read_only(
            run, cache_reader(files, run.device, run.progress.say), list(files.paths.values())
        )
        load = _load(run, from_cache, list(files.paths.values()), cache=folder)
        extra = keeping["seconds"] - load_seconds
        return {
            "written_bytes": files.num_bytes,
            "keeping": keeping,
            "extra_seconds": extra,
            "read_bytes": from_cache.read_bytes,
            "disk": disk,
            "load": load,
            "of_bound": _of_bound(load, disk, copy),
            "samples": compare_samples(run.parts(folder), run.args, run.config, run.shard),
        }


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


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder with config.json and safetensors files")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="(%(default)s)")
    parser.add_argument("--shard", default="", metavar="I/N", help="the part of rank I of N; default: all of it")
    parser.add_argument("--samples", type=int, default=50, help="matrices to compare with the files (%(default)s)")
    parser.add_argument("--warm", action="store_true", help="load once more with the page cache as it is then")
    parser.add_argument(
        "--weight-cache", default="", metavar="DIR", help="measure a cache of packed weights on this disk"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser
