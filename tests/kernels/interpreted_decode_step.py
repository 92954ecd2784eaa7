"""Steps of the whole model through the decode kernels, as on a GPU: the shortest prompt of the oracle `geo`."""

import importlib.util
import sys
from pathlib import Path

import engine.model.attention as attention

GEO = Path(__file__).parent.parent / "gpu/geo.py"


def test_steps_of_two_and_of_one_token_choose_as_golden(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_geo", GEO)
    geo = sys.modules.setdefault("gpu_geo", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(geo)
    # The prompt's nine tokens run as six without kernels (the interpreter takes a second for each token), two, and one.
    monkeypatch.setattr(attention, "DECODE_TOKENS", 2)
    checkpoint = geo.write_checkpoint(tmp_path / "geo")
    step, *others = geo.run(checkpoint, device="cpu", dtype="float32", index="fp4", lengths=(9,), steps=1, chunk=6)
    assert (others, step.fault) == ([], "")
    # More than nothing, so the kernels did run. At position 7 two experts of layer 1 score alike but for 0.002, and
    # their rounding of the queries chooses the other one: 0.14 from there on.
    assert step.reference is not None
    assert step.reference > 0
