"""Reading files in lots: the plan covers every byte that is wanted, whatever its order, and what is read is that."""

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.model.lots as lots
import engine.model.weights as weights
from engine.model.config import load_config
from engine.model.lots import Piece, Unit, plan_lots, read_lots
from engine.model.shard import Shard
from engine.model.shard_files import read_headers
from engine.model.weights import WeightLoader, WeightsError, load_weights


def folder_with(tmp_path, *files):
    """Write files of tensors of odd sizes and several types, with an index; return the folder and all tensors."""
    draw, tensors, places = torch.Generator().manual_seed(0), {}, []
    for number, count in enumerate(files):
        some = {}
        for at in range(count):
            size = int(torch.randint(1, 50, (), generator=draw))
            values = torch.randn(size, 3, generator=draw)
            some[f"{number}.{at}"] = [values, values.to(torch.bfloat16), (values * 9).to(torch.int8)][at % 3]
        save_file(some, tmp_path / f"model-{number}.safetensors")
        places += [f'"{name}": "model-{number}.safetensors"' for name in some]
        tensors |= some
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{", ".join(places)}}}}}')
    return tmp_path, tensors


def units_of(files, names, size):
    """Return units of `size` tensors each, in a random order."""
    names = list(names)
    random.Random(1).shuffle(names)
    groups = [names[at : at + size] for at in range(0, len(names), size)]
    return [Unit(group, None, tuple(Piece.of(name, files.tensors[name]) for name in group)) for group in groups]


@pytest.mark.parametrize(("lot_bytes", "gap_bytes"), [(1, 0), (400, 0), (400, 64), (10_000, 300), (1 << 20, 1 << 20)])
@pytest.mark.parametrize("size", [1, 3])
def test_every_unit_comes_once_with_the_bytes_of_its_files(tmp_path, monkeypatch, lot_bytes, gap_bytes, size):
    folder, tensors = folder_with(tmp_path, 7, 1, 30)
    monkeypatch.setattr(lots, "LOT_BYTES", lot_bytes)
    monkeypatch.setattr(lots, "_GAP_BYTES", gap_bytes)
    files = read_headers(folder)
    wanted = {name for name in tensors if not name.endswith("5")}  # gaps
    found = {}
    for lot, buffer in read_lots(plan_lots(units_of(files, wanted, size)), files.paths, pins=False):
        for unit in lot.units:
            assert not found.keys() & set(unit.key)
            found |= {name: tensor.clone() for name, tensor in lot.tensors(unit, buffer, buffer).items()}
        buffer.fill_(0xA5)  # nobody reads it later
    assert found.keys() == wanted
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in wanted)


def test_neighbours_are_one_read_and_some_rows_are_only_those(tmp_path):
    folder, tensors = folder_with(tmp_path, 30)
    files = read_headers(folder)
    [lot] = plan_lots(units_of(files, tensors, 1))
    assert len(lot.reads) == 1
    assert lot.num_bytes == files.num_bytes
    name = max(tensors, key=lambda name: tensors[name].shape[0])
    piece = Piece.of(name, files.tensors[name], slice(3, 9))
    [(lot, buffer)] = read_lots(plan_lots([Unit(name, None, (piece,))]), files.paths, pins=False)
    assert lot.num_bytes == 6 * 3 * tensors[name].element_size()
    assert torch.equal(lot.tensors(lot.units[0], buffer, buffer)[name], tensors[name][3:9])


def test_single_numbers_are_of_the_host_and_all_else_is_not(tmp_path):
    """A matrix of one tile has a scale of shape (1, 1): it is no number, and lies beside the matrix."""
    tensors = {f"{shape}": torch.ones(shape) for shape in [(), (1,), (1, 1), (3,)]}
    save_file(tensors, tmp_path / "model.safetensors")
    files = read_headers(tmp_path)
    units = [Unit(name, None, (Piece.of(name, files.tensors[name]),)) for name in tensors]
    [(lot, buffer)] = read_lots(plan_lots(units), files.paths, pins=False)
    there = torch.zeros_like(buffer)
    found = {unit.key: lot.tensors(unit, there, buffer)[unit.key] for unit in lot.units}
    assert {name for name, tensor in found.items() if tensor.any()} == {"()", "(1,)"}
    assert {name: str(tuple(tensor.shape)) for name, tensor in found.items()} == {name: name for name in tensors}


def test_a_file_cut_while_it_is_read_is_named(tmp_path):
    folder, tensors = folder_with(tmp_path, 3, 30)
    files = read_headers(folder)
    path = folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(OSError, match=r"model-1\.safetensors: ends at byte \d+ of \d+"):
        list(read_lots(plan_lots(units_of(files, tensors, 2)), files.paths, pins=False))


@pytest.mark.parametrize(("name", "shard", "packs"), [("tiny", None, False), ("mx", Shard(1, 2), True)])
def test_weights_are_the_same_in_lots_of_any_size(oracle, monkeypatch, name, shard, packs):
    """With rows of large matrices read a few at a time, and units larger than a lot."""
    folder = oracle.folder(name)
    config = load_config(folder)
    options = {"dtype": torch.bfloat16, "keeps_packed": packs, "shard": shard}
    wanted = load_weights(folder, config, **options).tensors
    monkeypatch.setattr(lots, "LOT_BYTES", 3000)
    monkeypatch.setattr(weights, "LARGE_BYTES", 1500)
    found = load_weights(folder, config, **options).tensors
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name].to(found[name].dtype))] == []
    large = {"head.weight"} if name == "tiny" else set()
    assert {name for name in found if found[name].dtype != wanted[name].dtype} >= large


def test_parts_come_a_layer_at_a_time_and_little_is_held(oracle):
    folder = oracle.folder("tiny")
    config, lines = load_config(folder), []
    loader = WeightLoader(folder, config, dtype=torch.float32, progress=lines.append)
    parts = dict(loader.parts())
    assert sorted(parts, key=str) == sorted([*range(config.num_hidden_layers), None], key=str)
    assert all(name.startswith(f"layers.{part}.") for part in parts if part is not None for name in parts[part])
    stored = sum(each.nbytes for each in load_file(folder / "model.safetensors").values())
    assert 0 < loader.stats.read_bytes <= stored
    assert f"{loader.stats.read_bytes / 1e9:.3f} GB read in" in lines[0]


def test_a_file_that_can_not_be_read_is_refused_by_name(oracle, edit):
    folder = edit("tiny", lambda tensors: None)
    loader = WeightLoader(folder, load_config(folder), dtype=torch.float32)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50_000])
    with pytest.raises(WeightsError, match=r"can't be read: .*model\.safetensors: ends at byte"):
        list(loader.parts())
