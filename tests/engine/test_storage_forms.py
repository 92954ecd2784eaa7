"""Checkpoints in every form in which they may be stored give the values, and the tokens, of the oracle."""

import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from engine.model.config import load_config
from engine.model.shard import Shard
from engine.model.shard_files import read_headers
from engine.model.stored_forms import form_of
from engine.model.weights import load_weights

TESTS = Path(__file__).resolve().parent.parent


def _module(name, path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


geo = _module("gpu_geo", TESTS / "gpu/geo.py")
forms = _module("engine_storage_forms", TESTS / "engine/storage_forms.py")
trials = _module("gpu_storage_forms", TESTS / "gpu/storage_forms.py")
MODELS = ["mx", pytest.param("geo", marks=pytest.mark.long)]
# Forms that decode kernels, too, are given as another one, bit for bit.
ALIKE = dict.fromkeys(("bytes", "spread", "fp8-f32-scales"), "stored")
ALIKE |= dict.fromkeys(("nvfp4-spread", "nvfp4-weights-only", "nvfp4-scalars-of-one"), "nvfp4")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A function of (model, form, keeps_packed) to what is loaded of it as float32.

    Kept for the module is what others are compared with.
    """

    def load(model, form, keeps_packed):
        folder = geo.write_checkpoint(tmp_path_factory.mktemp("form"), form=form, oracle=model)
        return load_weights(folder, load_config(folder), dtype=torch.float32, keeps_packed=keeps_packed)

    kept = functools.cache(load)
    return lambda model, form, *, keeps_packed: (kept if form in ("stored", "nvfp4") else load)(
        model, form, keeps_packed
    )


def _others(found, wanted):
    """Return the names of tensors that are not the same, of these or those."""
    same = {name for name in found.keys() & wanted.keys() if torch.equal(found[name], wanted[name])}
    return sorted((found.keys() | wanted.keys()) - same)


@pytest.mark.parametrize("model", MODELS)
def test_the_decoder_that_proves_forms_equal_gives_the_oracle_s_values(model):
    tensors, values = geo.weights(model)
    assert all(torch.equal(forms.value_of(tensors, name).to(value.dtype), value) for name, value in values.items())


def test_a_form_that_has_another_value_is_refused(monkeypatch):
    monkeypatch.setitem(forms.FORMS, "e5m2", forms.Form(forms._as_float(torch.float8_e5m2)))
    with pytest.raises(ValueError, match=r"e5m2: \d+ tensors have other values than stored, layers\.0"):
        forms.convert(geo.weights("mx")[0], "e5m2")


@pytest.mark.parametrize("keeps_packed", [False, True])
@pytest.mark.parametrize("is_nvfp4", [False, True], ids=["mxfp4", "nvfp4"])
def test_a_matrix_that_is_no_routed_expert_s_may_have_four_bits_too(oracle, edit, is_nvfp4, keeps_packed):
    shared, expert = "layers.1.ffn.shared_experts.w1", "layers.1.ffn.experts.2.w1"

    def change(tensors):
        tensors |= {f"{shared}.{part}": tensors[f"{expert}.{part}"].clone() for part in ("weight", "scale")}
        if is_nvfp4:
            forms._four_bits().to_nvfp4(tensors, re.escape(f"{shared}.weight"))

    folder = edit("mx", change)
    loaded = load_weights(folder, load_config(folder), dtype=torch.float32, keeps_packed=keeps_packed).tensors
    assert torch.equal(loaded[f"{shared}.weight"], oracle.weights("mx")[f"{expert}.weight"].float())


@pytest.mark.parametrize("form", forms.FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_every_form_is_loaded_with_the_stored_values_and_kept_as_decode_kernels_want_it(loaded, model, form):
    """What is packed is compared with the rest in test_packed_experts.py."""
    plain, kept = (loaded(model, form, keeps_packed=packs) for packs in (False, True))
    assert _others(plain.tensors, loaded(model, "stored", keeps_packed=False).tensors) == []
    layers = {int(name.split(".")[1]) for name in plain.tensors if name.startswith("layers.")}
    found = {tuple(kept.packed.get(f"layers.{n}.ffn.experts.{name}") for name in ("w13", "w2")) for n in layers}
    assert found == {forms.FORMS[form].kept}
    if form in ALIKE:
        assert _others(kept.tensors, loaded(model, ALIKE[form], keeps_packed=True).tensors) == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", [form for form in forms.FORMS if form not in ALIKE])
@pytest.mark.parametrize("model", MODELS)
def test_every_form_chooses_as_golden_at_every_stored_step(model, form, ranks):
    """Through the references of the decode kernels, which read packed experts where the form has any."""
    _, fault = trials.run(trials.Trial(model, form, ranks, "float32"), device="cpu")
    assert fault == ""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["stored", "expert-by-expert"])
@pytest.mark.parametrize("model", MODELS)
def test_forms_choose_as_golden_where_all_is_dequantised(model, form, ranks):
    """As on a CPU. There all forms are loaded as the same tensors: see above."""
    _, fault = trials.run(trials.Trial(model, form, ranks, "float32"), device="cpu", kernels=False)
    assert fault == ""


def test_experts_of_four_ranks_that_kernels_do_not_read_choose_as_golden():
    """A quarter of geo's experts is half a step of the kernels wide."""
    trial = trials.Trial("geo", "nvfp4-factors-differ", 4, "float32")
    told, fault = trials.run(trial, device="cpu", lengths=(130,), steps=2)
    assert fault == "" and told.startswith("dequantised")


def test_what_a_folder_s_forms_are_called(tmp_path):
    files = read_headers(geo.write_checkpoint(tmp_path, form="expert-by-expert", oracle="mx"))
    names = [f"layers.0.ffn.experts.{expert}.w2.weight" for expert in range(4)]
    assert [form_of(files.tensors, name) for name in names] == ["mxfp4", "nvfp4", "bf16", "e4m3"]


@pytest.mark.parametrize(("form", "ranks"), [("stored", 8), ("nvfp4", 16)])
def test_ranks_may_cut_a_group_of_columns_that_share_a_scale(loaded, tmp_path, form, ranks):
    whole = loaded("mx", form, keeps_packed=False).tensors
    folder = geo.write_checkpoint(tmp_path, form=form, oracle="mx")
    for index in (0, 1, ranks - 1):
        options = {"dtype": torch.float32, "keeps_packed": index == 1, "shard": Shard(index, ranks)}
        part = load_weights(folder, load_config(folder), **options).tensors
        for name in [name for name in whole if name.endswith("experts.w2")]:
            width = whole[name].shape[2] // ranks
            assert torch.equal(part[name], whole[name][:, :, index * width : (index + 1) * width])
