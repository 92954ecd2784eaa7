"""A checkpoint folder as the loader sees it: what its headers say, checked, and how its experts can be kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.model.config import DeepSeekV4Config
from engine.model.expert_stacks import InnerSlice, Packing, size_problem, split_name
from engine.model.shard_files import ShardFiles, StoredTensor, read_headers
from engine.model.stored_forms import WeightsError as WeightsError
from engine.model.stored_forms import beside, check_forms, four_bits_of, listed
from engine.model.tensor_specs import TensorSpec


def open_checkpoint(folder: Path, specs: Mapping[str, TensorSpec], config: DeepSeekV4Config) -> ShardFiles:
    """Return the weight files of a folder.

    specs: of the whole model. Raises WeightsError for files that are not whole, and for tensors that are missing,
    superfluous, or of a wrong type or shape; ConfigError for files that are missing.
    """
    files = read_headers(folder)
    refuse(folder, files.problems)
    refuse(folder, check_forms(files, specs, config))
    return files


def packings(
    tensors: Mapping[str, StoredTensor], specs: Mapping[str, TensorSpec], config: DeepSeekV4Config, inner: InnerSlice
) -> dict[str, Packing]:
    """Return how the experts' matrices can be kept, by stack, as far as headers tell."""
    found: dict[str, Packing] = {}
    for name in specs:
        place = split_name(name)
        if place is None:
            continue
        stack, format = place[0], four_bits_of(tensors, name)
        before = found.get(stack) or Packing(format, size_problem(stack, config, inner))
        reason = before.reason
        if not reason and format is None:
            reason = f"{name} is stored as {tensors[name].dtype}, not in four bits"
        if not reason and format == "mxfp4" and tensors[beside(name, "scale")].dtype == "F32":
            reason = f"{beside(name, 'scale')} is stored as F32, which the kernels don't read"
        both = "nvfp4" if "nvfp4" in (before.format, format) else format
        found[stack] = Packing(None, reason) if reason else Packing(both)
    return found


def refuse(folder: str | Path, problems: list[str]) -> None:
    """Raise WeightsError if there are problems."""
    if problems:
        raise WeightsError(listed(folder, problems))
