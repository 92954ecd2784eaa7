"""The weight files of a checkpoint folder: which tensor lies where, by the files' own headers. No torch here.

A safetensors file begins with the length of its header (8 bytes, little endian), the header, a JSON object of each
tensor's dtype, shape and place among the data that follow, and is exactly as long as these say. All headers of a
published checkpoint, 46 files with 70,000 tensors, are read in about a second, and nothing of the data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from engine.model.config import WEIGHT_INDEX, shard_paths, weight_map

# Bits of a value, by the names of the safetensors format.
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    "F4": 4,
}
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # what the format allows


class StoredTensor(NamedTuple):
    """file: its name in the folder.   start: of the first byte in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class ShardFiles(NamedTuple):
    """paths: by file name, in order.   tensors: by name.   problems: texts that name files or tensors; serve none."""

    folder: Path
    paths: dict[str, Path]
    tensors: dict[str, StoredTensor]
    problems: list[str]

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def read_headers(folder: str | Path) -> ShardFiles:
    """Return what the headers of a folder's weight files say, and what is wrong with them.

    Raises ConfigError for a file that the index names and the folder lacks, or an index that can't be read.
    """
    files = read_files(Path(folder), shard_paths(folder))
    opened = {tensor.file for tensor in files.tensors.values()}
    for name, file in weight_map(folder).items():
        found = files.tensors.get(name)
        if found is None and file in opened:
            files.problems.append(f"{name}: missing, {WEIGHT_INDEX} says that {file} has it")
        elif found is not None and found.file != file:
            files.problems.append(
                f"{name}: lies in {found.file}, {WEIGHT_INDEX} says {file}; fetch index and files of one revision"
            )
    return files


def read_files(folder: Path, paths: Iterable[Path]) -> ShardFiles:
    """Return what the headers of some files of a folder say, and what is wrong with them."""
    files = ShardFiles(folder, {path.name: path for path in paths}, {}, [])
    for path in files.paths.values():
        try:
            entries = _entries(path)
        except OSError as error:
            remedy = "see who may read it" if isinstance(error, PermissionError) else "see what is wrong with its disk"
            files.problems.append(f"{path.name}: can't be opened ({error.strerror}); {remedy}, or fetch it again")
            continue
        except ValueError as error:
            files.problems.append(f"{path.name}: can't be opened ({error}); fetch it again")
            continue
        for name, tensor in entries:
            if name in files.tensors:
                files.problems.append(
                    f"{name}: stored in both {files.tensors[name].file} and {path.name}; fetch both again"
                )
            files.tensors[name] = tensor
    return files


def _entries(path: Path) -> list[tuple[str, StoredTensor]]:
    """Return the tensors of a file by name. Raises ValueError saying what is wrong with the file, or OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or not 2 <= length <= _LARGEST_HEADER:
            raise ValueError(f"no safetensors file: {size} bytes that begin with {length} as the length of a header")
        if length > size - _LENGTH_BYTES:
            raise ValueError(f"cut short: a header of {length} bytes in a file of {size}")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=list)  # a name that stands twice is to be seen
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {error}") from None
    if not isinstance(header, list) or not all(isinstance(entry, tuple) for entry in header):
        raise ValueError("its header is no JSON object")
    first = _LENGTH_BYTES + length
    entries = [(name, _stored(path.name, name, about, first, size)) for name, about in header if name != "__metadata__"]
    end = max((tensor.start + tensor.num_bytes for _, tensor in entries), default=first)
    if end != size:
        how = "cut short" if end > size else "too long"
        raise ValueError(f"{how}: its tensors end at byte {end}, the file at {size}")
    at, before = first, ""
    for name, tensor in sorted(entries, key=lambda entry: (entry[1].start, entry[1].num_bytes)):  # empty ones first
        if tensor.start < at:
            raise ValueError(f"{before} and {name} overlap")
        at, before = tensor.start + tensor.num_bytes, name
    return entries


def _stored(file: str, name: str, pairs: Any, first: int, size: int) -> StoredTensor:
    """pairs: of the tensor's entry, or what stands in its place."""
    if not name.isprintable():
        raise ValueError(f"its header calls a tensor {name!a}")
    try:
        about = dict(pairs)
        dtype, shape, (begin, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
        bits = DTYPE_BITS[dtype]
        if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
            raise TypeError(f"shape {list(shape)}, data_offsets {[begin, end]}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header says nothing sound of {name} ({type(error).__name__}: {error})") from None
    wanted = -(-math.prod(shape) * bits // 8)
    if end - begin != wanted:
        raise ValueError(f"{name} takes {end - begin} bytes, not the {wanted} of {list(shape)} {dtype}")
    return StoredTensor(file, dtype, shape, first + begin, end - begin)
