"""The expert layers of the oracle `geo`, from a stored checkpoint through decode kernels, against its float weights.

    python -m tests.gpu.geo_experts [--device cuda]     from the repository's root; exit code 1 if a layer fails

Each layer of geo as it is stored (MXFP4), as NVFP4, and with w1, w3 in one and w2 in the other: read by the loader,
packed, and given to MixtureOfExperts as a decode step with padding tokens. Wanted: what tests/oracle/ref_v4.py makes of
the weights that make_golden.py dequantised itself. On a CPU without TRITON_INTERPRET=1 the kernels' references run.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent.parent
LAYERS, TOKENS = range(5), (1, 7, 40)  # the first layer goes by token id
# Of the largest output. f16 keeps x and what lies between the products to 2^-11 of each, and the errors of 256 and 128
# channels add up at random: up to 2.9e-4 with the references on the CPU, and the same in the interpreter. In bfloat16
# the shared expert's products, and what lies between them, are rounded to 2^-9: up to 4.6e-3.
BOUNDS = {"float32": 1e-3, "bfloat16": 1e-2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Layers:
    """The expert layers of geo in some formats, made in `folder` on first use."""

    def __init__(self, folder: Path, formats: str, *, device: str, dtype: str) -> None:
        self._geo = _module("gpu_geo", TESTS / "gpu/geo.py")
        self._raw, self._reference = self._geo.read_config(), None
        self._device, self._dtype, self.formats = device, dtype, formats
        self._folder = self._geo.write_checkpoint(folder, nvfp4=self._geo.EXPERTS[formats])

    def error(self, layer: int, tokens: int) -> float:
        """Return how far a step of `tokens` tokens, and two padding ones, is off, in parts of the largest output."""
        self._load()
        experts = self._experts[layer]
        draw = torch.Generator().manual_seed(1000 * layer + tokens)
        x = torch.randn(tokens + 2, self._raw["hidden_size"], generator=draw).to(DTYPES[self._dtype])
        ids = torch.randint(0, self._raw["vocab_size"], (tokens + 2,), generator=draw)
        wanted = self._reference.moe(f"layers.{layer}.ffn.", x[:tokens].float(), ids[:tokens])
        x[tokens:] = math.nan  # padding may hold anything
        with torch.inference_mode():
            got = experts(x.to(self._device), ids.to(self._device), decode_step(tokens, 2, self._device)).float().cpu()
        gap = (got[:tokens] - wanted).abs().max() / wanted.abs().max()
        return float(gap.nan_to_num(math.inf))

    def fault(self, layer: int, tokens: int) -> str:
        """Return what is wrong with that, "" if nothing."""
        error, bound = self.error(layer, tokens), BOUNDS[self._dtype]
        return "" if error < bound else f"off by {error:.2e} of the largest, bound {bound}"

    def _load(self) -> None:
        if self._reference is not None:
            return
        from engine.model.config import load_config
        from engine.model.moe import MixtureOfExperts
        from engine.model.weights import load_weights

        config = load_config(self._folder)
        loaded = load_weights(self._folder, config, dtype=DTYPES[self._dtype], device=self._device, keeps_packed=True)
        wanted = {"both": {"mxfp4", "nvfp4"}}.get(self.formats, {self.formats})
        if set(loaded.packed.values()) != wanted or len(loaded.packed) != 2 * len(LAYERS):
            raise RuntimeError(f"packed {loaded.packed}, dequantised {loaded.dequantized}: wanted all in {wanted}")
        tensors = {name: tensor.to(self._device) for name, tensor in loaded.tensors.items() if ".ffn." in name}
        self._experts = [MixtureOfExperts(tensors, layer, config) for layer in LAYERS]
        values = self._geo.weights()[1]
        self._reference = _module("ref_v4", TESTS / "oracle/ref_v4.py").RefV4(self._raw, values)


def decode_step(tokens: int, padding: int, device: str):
    """Return the batch of a step with one token for each of `tokens` sequences, and padding."""
    from kernels.ragged import RaggedBatch

    spans = [(5, 1)] * (tokens + padding)
    batch = RaggedBatch.build(spans, slots=range(len(spans)), block_tables=[[0]] * len(spans), device=device).decode
    sequence = batch.sequence.clone()
    sequence[tokens:] = -1
    return dataclasses.replace(batch, sequence=sequence)


def _module(name: str, path: Path):
    """Import a file of the tests, which are no package, under a name of its own."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def main() -> int:
    """Run every layer in every format and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    from kernels.triton_env import INTERPRETED

    if INTERPRETED:
        _module("interp", TESTS / "kernels/interp.py").repair()
    faults = 0
    for dtype in BOUNDS:
        for formats in ("mxfp4", "nvfp4", "both"):
            with tempfile.TemporaryDirectory(prefix="isthmus-geo-") as folder:
                layers = Layers(Path(folder), formats, device=args.device, dtype=dtype)
                for layer in LAYERS:
                    for tokens in TOKENS:
                        error = layers.error(layer, tokens)
                        fault = "" if error < BOUNDS[dtype] else f"  bound {BOUNDS[dtype]}"
                        faults += bool(fault)
                        print(f"{error:.2e} {dtype} {formats} layer {layer}, {tokens} tokens{fault}", flush=True)
    print(f"{faults} failed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
