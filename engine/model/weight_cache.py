"""A rank's tensors as its model takes them, packed and cut, kept in a folder: a later start reads just these.

    ROOT/KEY/manifest.json     what the tensors are of: checkpoint, part, dtypes, order (KEY hashes these); files, sums
    ROOT/KEY/part-….safetensors   a layer's tensors, or those of no layer

A folder appears under its name when all of it is on disk. One that lacks files, or has others than its manifest says,
is never read: it is made again. What is read has a CRC-32 for each stretch, looked at by the threads that read: where
one differs, the start is refused and the folder removed, since parts of it are in the model by then. What can't be
written is not kept, and said; the weights are served all the same.

A checkpoint that was written to anew is another one, though it may look the same where model_fingerprint looks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from engine.model.checkpoint import WeightsError
from engine.model.config import ConfigError, DeepSeekV4Config, model_fingerprint, shard_paths
from engine.model.lots import DTYPES, LARGE_BYTES, Check, Lot, Piece, Unit
from engine.model.parts import PartReader, Tensors, WeightPart, layer_of
from engine.model.shard import Shard
from engine.model.shard_files import ShardFiles, StoredTensor, read_files
from engine.model.weights import WeightLoader
from kernels.expert_weights import ORDER

_MANIFEST = "manifest.json"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Say = Callable[[str], None]
Sums = dict[str, list[int]]  # of each tensor, CRC-32 of its stretches in order


def read_weights(
    folder: str | Path,
    config: DeepSeekV4Config,
    *,
    dtype: torch.dtype,
    device: torch.device,
    keeps_packed: bool,
    shard: Shard,
    progress: Say | None = None,
    cache: str | Path = "",
) -> Generator[WeightPart, None, None]:
    """Yield a checkpoint's parts as a WeightLoader does, from the folder `cache` if they lie there.

    cache: if they don't, they are put there; "": neither.
    """
    say = progress or (lambda _: None)
    loader = partial(
        WeightLoader,
        folder,
        config,
        dtype=dtype,
        device=device,
        keeps_packed=keeps_packed,
        shard=shard,
        progress=say,
    )
    if not cache:
        yield from loader().parts()
        return
    kept = WeightCache(
        Path(cache),
        fingerprint=lambda: _stamp(folder),
        shard=shard,
        dtype=dtype,
        keeps_packed=keeps_packed,
        device=device,
        say=say,
    )
    yield from kept.load() or kept.keep(loader().parts())


class _Damaged(Exception):
    """Bytes are not those that were written. The text names the tensor."""


class _Rows(NamedTuple):
    name: str
    to: slice | None


class WeightCache:
    """The tensors of one rank."""

    def __init__(
        self,
        root: Path,
        *,
        fingerprint: Callable[[], str],
        shard: Shard,
        dtype: torch.dtype,
        keeps_packed: bool,
        device: torch.device,
        say: Say,
    ) -> None:
        """fingerprint: of config and weights as they lie there now.   device: as WeightLoader has it."""
        self._fingerprint = fingerprint
        self._key = {
            "checkpoint": fingerprint(),
            "part": f"{shard.index}/{shard.count}{' by expert' if shard.by_expert else ''}",
            "dtype": str(dtype).removeprefix("torch."),
            "order": ORDER if keeps_packed else "",
        }
        self.folder = root / hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:16]
        self._device, self._say = device, say
        self._sums: Sums = {}  # of what was written

    def load(self) -> Iterator[WeightPart] | None:
        """Return the parts that lie here, None if there are none that can be used."""
        try:
            if not self.folder.exists():
                return None
            for path in self.folder.iterdir():
                if not path.is_file():  # to open a pipe is to wait for who writes into it
                    raise ValueError(f"{path.name} is not a regular file")
            manifest = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))
            files, sums = cache_files(self.folder), manifest.pop("sums", None) if isinstance(manifest, dict) else None
            if manifest != self._key | {"files": _digests(files.paths.values())}:
                raise ValueError(f"{_MANIFEST} is of another checkpoint or part, or of other files")
            if files.problems:
                raise ValueError(files.problems[0])
            reader = cache_reader(files, self._device, self._say, _check(files, sums))
        except (OSError, ValueError) as problem:
            self._say(f"weights: the cache {self.folder} is not used and made again: {problem}")
            shutil.rmtree(self.folder, ignore_errors=True)
            return None
        self._say(f"weights: from the cache {self.folder}")
        return self._parts(reader, files)

    def keep(self, parts: Iterator[WeightPart]) -> Iterator[WeightPart]:
        """Yield parts on, writing each; the cache is there once all have been taken."""
        writing = self.folder.with_name(f".{self.folder.name}.{secrets.token_hex(4)}")
        is_kept = True
        with contextlib.ExitStack() as ending:
            ending.callback(shutil.rmtree, writing, ignore_errors=True)
            is_kept = self._tried(self._begin, writing, ending)
            for part, tensors in parts:
                if is_kept:
                    is_kept = self._tried(self._write, writing, part, tensors)
                    if not is_kept:  # what others may need the space for
                        shutil.rmtree(writing, ignore_errors=True)
                yield part, tensors
            if is_kept and self._tried(self._publish, writing):
                self._say(f"weights: kept in the cache {self.folder}")

    def _begin(self, writing: Path, ending: contextlib.ExitStack) -> None:
        """Make the folder to write into; remove those of processes that died while they wrote: nobody locks them."""
        for left in self.folder.parent.glob(f".{self.folder.name}.*"):
            with contextlib.suppress(OSError), _locked(left):
                shutil.rmtree(left, ignore_errors=True)
        writing.mkdir(parents=True)
        with contextlib.suppress(OSError):  # some file systems lock no folders: there they stay
            ending.enter_context(_locked(writing))

    def _write(self, writing: Path, part: int | None, tensors: Tensors) -> None:
        self._sums |= _write_part(writing, part, tensors)

    def _tried(self, write: Callable[..., None], *args: object) -> bool:
        try:
            write(*args)
        except (OSError, ConfigError) as problem:
            self._say(f"weights: not kept in the cache {self.folder}: {problem}")
            return False
        return True

    def _publish(self, writing: Path) -> None:
        if self._fingerprint() != self._key["checkpoint"]:
            raise OSError("the checkpoint was changed while it was loaded")
        manifest = self._key | {"files": _digests(writing.glob("*.safetensors")), "sums": self._sums}
        (writing / _MANIFEST).write_text(json.dumps(manifest, sort_keys=True), encoding="utf-8")
        try:
            os.rename(writing, self.folder)
        except OSError:  # another process may have made it meanwhile, from the same weights
            if not (self.folder / _MANIFEST).exists():
                raise

    def _parts(self, reader: PartReader, files: ShardFiles) -> Iterator[WeightPart]:
        def take(unit: Unit, raw: Tensors, tensors: Tensors) -> None:
            name, to = unit.key
            if to is None:
                tensors[name] = raw[name].clone()
                return
            if name not in tensors:
                shape = files.tensors[name].shape
                tensors[name] = torch.empty(shape, dtype=raw[name].dtype, device=self._device)
            tensors[name][to] = raw[name]

        try:
            yield from reader.parts(take)
        except OSError as problem:
            raise WeightsError(f"{self.folder}: can't be read, delete it: {problem}") from None
        except _Damaged as problem:
            shutil.rmtree(self.folder, ignore_errors=True)
            remedy = "delete it" if self.folder.exists() else "and removed; start again"
            raise WeightsError(f"{self.folder}: damaged, {remedy}: {problem}") from None
        self._say(f"weights: {reader.stats.read_bytes / 1e9:.3f} GB read in {reader.stats.seconds:.1f} s")


def cache_files(folder: Path) -> ShardFiles:
    """Return the files of one rank's tensors."""
    return read_files(folder, sorted(folder.glob("*.safetensors")))


def cache_reader(files: ShardFiles, device: torch.device, say: Say, check: Check | None = None) -> PartReader:
    """Return what reads all of the files, with units as `_units` has them."""
    units = [unit for name, stored in files.tensors.items() for unit in _units(name, stored)]
    return PartReader(units, files.paths, device=device, say=say, check=check)


def _check(files: ShardFiles, sums: object) -> Check:
    """Return what compares lots with the sums that were written. Raises ValueError if these are of other stretches."""
    wanted: dict[StoredTensor, int] = {}
    for name, stored in files.tensors.items():
        places = [piece.stored for unit in _units(name, stored) for piece in unit.pieces]
        found = sums.get(name) if isinstance(sums, dict) else None
        count = len(found) if isinstance(found, list) else 0
        if found is None or count != len(places):
            raise ValueError(f"{_MANIFEST} has {count} sums of {name}, wanted {len(places)}")
        wanted |= dict(zip(places, found, strict=True))

    def check(lot: Lot, memory: memoryview) -> None:
        for piece, at in lot.places.items():
            if zlib.crc32(memory[at : at + piece.stored.num_bytes]) != wanted[piece.stored]:
                raise _Damaged(f"{piece.stored.file}: {piece.name} is not what was written")

    return check


def _stamp(folder: str | Path) -> str:
    """Return what changes with a checkpoint's config or weights. Raises ConfigError."""
    written = [path.stat().st_mtime_ns for path in shard_paths(folder)]
    return f"{model_fingerprint(folder)} {hashlib.sha256(repr(written).encode()).hexdigest()[:16]}"


def _digests(paths: Iterable[Path]) -> dict[str, str]:
    """Return a hash of each file's header by its name."""
    found = {}
    for path in paths:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            found[path.name] = hashlib.sha256(file.read(min(length, path.stat().st_size))).hexdigest()
    return found


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError if another process has it."""
    with contextlib.ExitStack() as opened:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        opened.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _units(name: str, stored: StoredTensor) -> list[Unit]:
    """Return what is read of a tensor: all of it, or for a large one some rows at a time."""
    part, rows = layer_of(name), stored.shape[0] if stored.shape else 1
    if stored.num_bytes <= LARGE_BYTES:
        return [Unit(_Rows(name, None), part, (Piece.of(name, stored),))]
    step = max(1, LARGE_BYTES * rows // max(1, stored.num_bytes))
    cuts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    return [Unit(_Rows(name, cut), part, (Piece.of(name, stored, cut),)) for cut in cuts]


def _write_part(folder: Path, part: int | None, tensors: Tensors) -> Sums:
    """Write a safetensors file, a stretch of a tensor at a time: host memory never has all of a large one."""
    header, stored, end = dict[str, object](), dict[str, StoredTensor](), 0
    for name, tensor in tensors.items():
        size, dtype = tensor.numel() * tensor.element_size(), _NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        stored[name] = StoredTensor("", dtype, tuple(tensor.shape), end, size)
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the format asks
    sums: Sums = {name: [] for name in tensors}
    with (folder / f"part-{'ends' if part is None else f'{part:03}'}.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            for unit in _units(name, stored[name]):
                some = tensor if unit.key.to is None else tensor[unit.key.to]
                data = some.contiguous().view(-1).view(torch.uint8).cpu().numpy().data
                sums[name].append(zlib.crc32(data))
                file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return sums
