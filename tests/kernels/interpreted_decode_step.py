"""Steps of the whole model through the decode kernels, as on a GPU: the shortest prompt of the oracle `geo`."""

import importlib.util
import sys
from pathlib import Path

GEO = Path(__file__).parent.parent / "gpu/geo.py"


def test_steps_of_eight_and_of_one_token_choose_as_golden(tmp_path):
    spec = importlib.util.spec_from_file_location("gpu_geo", GEO)
    geo = sys.modules.setdefault("gpu_geo", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(geo)
    checkpoint = geo.write_checkpoint(tmp_path / "geo")
    steps = geo.run(checkpoint, device="cpu", dtype="float32", index="fp4", lengths=(9,), steps=2)
    assert [(s.step, s.fault) for s in steps] == [(0, ""), (1, "")]
    assert all(s.reference is not None and s.reference > 0 for s in steps)  # the kernels did run
