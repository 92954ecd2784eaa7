"""Logits of real worker processes against the colocated reference: rows are matched by the tokens that they follow."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.logits_log import DIGEST_BYTES, digest

HERE = Path(__file__).parent
# Both sides compute in float32, in batches of other shapes, so sums differ in order: about 1e-5 seen.
# Foreign or missing cache is off by 0.1 and more.
TOLERANCE = 1e-4


def _pair_module() -> Any:
    if "cluster_pair" not in sys.modules:
        spec = importlib.util.spec_from_file_location("cluster_pair", HERE / "pair.py")
        assert spec is not None and spec.loader is not None
        sys.modules["cluster_pair"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["cluster_pair"])
    return sys.modules["cluster_pair"]


class LogitsCheck:
    """Compares what ranks have appended to `folder` with one runner that serves alone, without any transfer."""

    def __init__(self, folder: Path, model: Path, **options: Any) -> None:
        """options: of EngineConfig, as the cluster has them."""
        torch.set_num_threads(1)
        config = EngineConfig(role="prefill", model=str(model), kv_cache_memory_gib=0.06, **options)
        self.folder = folder
        self._colocated = _pair_module().Colocated(config)
        self._rows: dict[bytes, np.ndarray[Any, Any]] = {}
        self._read: dict[Path, int] = {}

    def learn(self, prompt: tuple[int, ...], count: int, **sampling: Any) -> list[int]:
        """Compute a request by the reference; returns its `count` tokens."""
        tokens, logits = self._colocated.generate(prompt, count, **sampling)
        for index in range(count):
            self._rows[digest([*prompt, *tokens[:index]])] = logits[index].numpy()
        return list(tokens)

    def compare(self) -> tuple[int, float]:
        """Compare what is new since the last call; return how many rows were known, and the largest distance."""
        size = len(next(iter(self._rows.values())))
        record = np.dtype([("digest", f"V{DIGEST_BYTES}"), ("logits", "<f4", (size,))])
        count, worst = 0, 0.0
        for path in sorted(self.folder.glob("*.bin")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = len(data) // record.itemsize * record.itemsize
            self._read[path] = self._read.get(path, 0) + whole
            for row in np.frombuffer(data[:whole], record):
                right = self._rows.get(row["digest"].tobytes())
                if right is not None:
                    gap = np.abs(row["logits"] - right)
                    count, worst = count + 1, max(worst, float(gap.max()) if np.isfinite(gap).all() else float("inf"))
        return count, worst
