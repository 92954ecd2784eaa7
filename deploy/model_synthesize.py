"""`isthmus model synthesize OUT --like v4-flash`: an official-format checkpoint of the real shapes, random weights.

To test loading at its real size without a download: several safetensors files with an index, config.json and
generation_config.json. Files are written in pieces, each drawn by the thread that writes it, so that host memory stays
small and every core works. The text that such a model says means nothing. No torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deploy.synthetic_checkpoint import LIKE, Drawn, draw, make_config, tensors_of
from deploy.tiny_model import GENERATION_CONFIG
from engine.flags import ConfigError, parse_flags
from engine.model.config import WEIGHT_INDEX
from engine.model.shard_files import DTYPE_BITS

_PIECE_BYTES = 2 << 20  # larger ones cost page faults
_TELL_EVERY_S = 1.0
_SLACK_BYTES = 1 << 20
_DESCRIPTION = """\
Write a checkpoint with the official tensor names, forms and shapes and random weights: to test loading at its real size
without a download. The same seed gives the same bytes. It has no tokenizer: prompts are token ids, unless you copy
tokenizer.json and encoding/ from a published checkpoint. What the model says means nothing.
"""
_EPILOG = """\
examples:
  isthmus model synthesize /data/six-layers --like v4-flash --layers 6                    about 23 GB
  isthmus model synthesize /data/nvfp4 --like v4-flash --layers 6 --experts nvfp4 --mtp
  isthmus model synthesize ./small --like tiny && isthmus model check ./small
"""


class Shard(NamedTuple):
    """A file to be written. header: with its length before it.   starts: of each tensor's bytes in the file."""

    name: str
    header: bytes
    tensors: tuple[Drawn, ...]
    starts: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.starts[-1] + self.tensors[-1].num_bytes


def main(argv: list[str]) -> int:
    """Run `isthmus model synthesize`; return its exit code. Raises ConfigError for wrong usage or too little room."""
    parser = argparse.ArgumentParser(
        prog="isthmus model synthesize",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("out", metavar="OUT", help="folder to write, new or empty")
    parser.add_argument("--like", choices=LIKE, required=True, help="whose shapes")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="the first N layers; default: all")
    parser.add_argument("--experts", choices=("mxfp4", "nvfp4"), default="mxfp4", help="form of routed experts (mxfp4)")
    parser.add_argument("--mtp", action="store_true", help="with the drafting block mtp.0, which loading reads past")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random weights (0)")
    parser.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="of one file (5)")
    args = parse_flags(parser, argv)
    if args.layers < 0 or args.shard_gb <= 0:
        raise ConfigError(f"--layers {args.layers}, --shard-gb {args.shard_gb:g}: wanted numbers above 0")
    try:
        config = make_config(args.like, layers=args.layers, experts=args.experts, has_mtp=args.mtp)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    out = Path(args.out)
    try:
        num_bytes, seconds = synthesize(out, config, args.experts, seed=args.seed, shard_bytes=int(args.shard_gb * 1e9))
    except OSError as error:
        print(f"isthmus model synthesize: {out}: {error.strerror or error}; what was written is left", file=sys.stderr)
        return 1
    print(f"{out}: {num_bytes / 1e9:.2f} GB in {seconds:.1f} s, {num_bytes / 1e9 / seconds:.2f} GB/s")
    print("no tokenizer is made up: to chat, copy tokenizer.json and encoding/ from a published checkpoint")
    return 0


def synthesize(
    out: Path,
    config: dict[str, Any],
    experts: Any,
    *,
    seed: int = 0,
    shard_bytes: int = 5 * 10**9,
    say: Callable[[str], None] = print,
) -> tuple[int, float]:
    """Write the checkpoint of a config (make_config); return (bytes, seconds). Configs and index come last.

    experts: "mxfp4" or "nvfp4".   shard_bytes: of one file, about. Raises ConfigError if `out` is not empty or its disk
    has too little room, OSError.
    """
    shards = plan_shards(tensors_of(config, experts), shard_bytes)
    num_bytes = sum(shard.num_bytes for shard in shards)
    _make_room(out, num_bytes, say)
    start = time.perf_counter()
    progress = _Progress(num_bytes, say)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for shard in shards:
            _write(out / shard.name, shard, seed, pool, progress)
    index = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    document = {"metadata": {"total_size": sum(t.num_bytes for s in shards for t in s.tensors)}, "weight_map": index}
    for name, content in (
        (WEIGHT_INDEX, document),
        ("generation_config.json", GENERATION_CONFIG),
        ("config.json", config),
    ):
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
    return num_bytes, time.perf_counter() - start


def plan_shards(tensors: Iterable[Drawn], shard_bytes: int) -> list[Shard]:
    """Return the files of a checkpoint, each with at least one tensor, its widest types first: so all are aligned."""
    parts: list[list[Drawn]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.num_bytes > shard_bytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.num_bytes
    return [
        _shard(f"model-{i:05d}-of-{len(parts):05d}.safetensors", sorted(part, key=lambda t: -DTYPE_BITS[t.dtype]))
        for i, part in enumerate(parts, 1)
    ]


def _shard(name: str, tensors: list[Drawn]) -> Shard:
    ends = list(itertools.accumulate(tensor.num_bytes for tensor in tensors))
    begins = [0, *ends[:-1]]
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, begin, end in zip(tensors, begins, ends, strict=True):
        about[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Shard(name, header, tuple(tensors), tuple(len(header) + begin for begin in begins))


def _make_room(out: Path, num_bytes: int, say: Callable[[str], None]) -> None:
    """Make the folder, unless it holds something or its disk has too little room. Raises ConfigError, OSError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: there is something already; name a new folder, or empty this one")
    there = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    room = f"{num_bytes / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free"
    if free < num_bytes + _SLACK_BYTES:
        raise ConfigError(f"{out}: {room}; make room, name a folder of another disk, or lower --layers")
    say(f"{out}: {room}")
    out.mkdir(parents=True, exist_ok=True)


def _write(path: Path, shard: Shard, seed: int, pool: ThreadPoolExecutor, progress: _Progress) -> None:
    with path.open("wb") as file:
        os.truncate(file.fileno(), shard.num_bytes)
        os.pwrite(file.fileno(), shard.header, 0)

        def write(piece: tuple[Drawn, int, int, int]) -> None:
            tensor, first, count, at = piece
            data = draw(tensor, seed, first, count).view(np.uint8).data
            while data:
                written = os.pwrite(file.fileno(), data, at)
                data, at = data[written:], at + written
                progress.add(written)

        progress.add(len(shard.header))
        for _ in pool.map(write, _pieces(shard)):
            pass


def _pieces(shard: Shard) -> Iterator[tuple[Drawn, int, int, int]]:
    """Yield (tensor, its first element, elements, where they go)."""
    for tensor, start in zip(shard.tensors, shard.starts, strict=True):
        width = DTYPE_BITS[tensor.dtype] // 8
        total = tensor.num_bytes // width
        each = _PIECE_BYTES // width // tensor.row_elements * tensor.row_elements
        for first in range(0, total, each):
            yield tensor, first, min(each, total - first), start + first * width


class _Progress:
    """Says now and then how far it is; threads add to it."""

    def __init__(self, num_bytes: int, say: Callable[[str], None]) -> None:
        self._total, self._say, self._done = num_bytes, say, 0
        self._lock, self._start = threading.Lock(), time.perf_counter()
        self._told = self._start

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now = time.perf_counter()
            if now - self._told < _TELL_EVERY_S:
                return
            self._told = now
            speed = self._done / (now - self._start)
            left = (self._total - self._done) / speed
        self._say(
            f"written {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB, {speed / 1e9:.2f} GB/s, {left:.0f} s left"
        )
