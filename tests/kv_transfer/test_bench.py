"""`isthmus bench transfer`: what it reports, and that it reports nothing of bytes that did not land."""

from __future__ import annotations

import importlib.util
import json
import math
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from engine.model.config import load_config
from engine.model.layout import build_layout
from kv_transfer import bench
from kv_transfer.bench_layouts import flash_layout, tiny_layout
from kv_transfer.bench_receiver import Setting, _serve
from kv_transfer.bench_writer import Bench
from kv_transfer.local_transport import LocalRegistry, LocalTransport
from kv_transfer.plan import TransferPlan, plan_push
from kv_transfer.transport import Transfer, TransferError
from kv_transfer.warm import warm

from .conftest import require_nixl

TESTS = Path(__file__).parents[1]


def test_the_flash_layout_is_the_engines() -> None:
    spec = importlib.util.spec_from_file_location("engine_test_layout", TESTS / "engine" / "test_layout.py")
    assert spec is not None and spec.loader is not None
    published = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(published)
    built = build_layout(published.FLASH, block_tokens=256, kv_cache_dtype="packed", index_cache_dtype="fp8")
    assert flash_layout() == built


def test_the_tiny_layout_is_the_engines() -> None:
    model = load_config(TESTS / "oracle" / "tiny")
    assert tiny_layout() == build_layout(model, block_tokens=256, kv_cache_dtype="fp32", index_cache_dtype="fp8")


# ------------------------------------------------------------ two processes


def run(file: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Return exit code and document of the command, on a small cache."""
    words = ("--model-layout", "tiny", "--repetitions", "3", "--json", str(file), *words)
    return bench.main(words), json.loads(file.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A document with prompts of 3 and 7 blocks, the latter also in chunks of 2."""
    require_nixl()
    file = tmp_path_factory.mktemp("bench") / "rows.json"
    words = ("--transport", "nixl", "--lengths", "700,1700", "--chunk-tokens", "512")
    code, document = run(file, *words)
    assert (code, document["not_measured"]) == (0, {})
    return document


def of(document: dict[str, Any], **wanted: object) -> dict[str, Any]:
    found = [r for r in document["runs"] if all(r[k] == v for k, v in wanted.items())]
    assert len(found) == 1
    return found[0]


def test_every_length_is_measured_in_both_orders_and_long_ones_in_chunks(measured: dict[str, Any]) -> None:
    runs = [(r["tokens"], r["order"], r["chunk_tokens"]) for r in measured["runs"]]
    assert runs == [
        (tokens, order, chunk) for tokens in (700, 1700) for chunk in (0, 512) for order in ("merged", "fragmented")
    ]


def test_bytes_are_the_whole_blocks_of_the_prompt_and_its_state(measured: dict[str, Any]) -> None:
    layout = tiny_layout()
    expected = 7 * layout.block_bytes + layout.slot_bytes
    assert {r["num_bytes"] for r in measured["runs"] if r["tokens"] == 1700} == {expected}


def test_neighbours_are_one_piece_a_group_and_chunk(measured: dict[str, Any]) -> None:
    assert of(measured, tokens=1700, order="merged", chunk_tokens=0)["num_pieces"] == 3 + 1
    assert of(measured, tokens=1700, order="merged", chunk_tokens=512)["num_pieces"] == 4 * 3 + 1


def test_a_random_order_takes_more_pieces(measured: dict[str, Any]) -> None:
    assert 4 < of(measured, tokens=1700, order="fragmented", chunk_tokens=0)["num_pieces"] <= 7 * 3 + 1


def test_rates_are_bytes_over_times(measured: dict[str, Any]) -> None:
    for r in measured["runs"]:
        took_us = r["total_us"] if r["chunk_tokens"] else r["done_us"]
        assert math.isclose(r["gb_per_s"], r["num_bytes"] / took_us / 1e3, rel_tol=0.01, abs_tol=0.002)
        assert math.isclose(
            r["share_of_one_piece"], r["gb_per_s"] / r["one_piece_gb_per_s"], rel_tol=0.01, abs_tol=0.01
        )


def test_a_write_ends_after_its_post(measured: dict[str, Any]) -> None:
    assert all(0 < r["post_us"] <= r["done_us"] for r in measured["runs"])


def test_conditions_say_where_it_was_measured(measured: dict[str, Any]) -> None:
    said = measured["conditions"]
    assert said["device"] == "cpu" and said["cores"] >= 1 and said["commit"] and said["packages"]["torch"]


def test_what_does_not_start_is_a_line_with_the_reason(tmp_path: Path) -> None:
    code, document = run(tmp_path / "rows.json", "--transport", "nixl", "--device", "cuda", "--device-ids", "99,99")
    assert (code, document["runs"]) == (1, [])
    assert "no GPU number 99" in document["not_measured"]["nixl"]


@pytest.mark.parametrize(
    "words", [("--chunk-tokens", "300"), ("--lengths", "0"), ("--device-ids", "1"), ("--repetitions", "0")], ids=str
)
def test_wrong_flags_are_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(words)
    assert words[0] in capsys.readouterr().err


# ------------------------------------------------------------ in one process, over a lane that lies

SETTING = Setting(
    transport="local",
    device="cpu",
    device_ids=(0, 0),
    layout="tiny",
    lengths=(600,),
    chunk_tokens=512,
    repetitions=2,
    nap_us=100,
    seed=3,
)


class Lossy(LocalTransport):
    """Says that a write has ended, but `spoil` was let at the pool of its last piece, if that is `target`."""

    target = ""
    spoil: Callable[[str, int], None]

    def write(self, agent: str, plan: TransferPlan, notification: bytes = b"") -> Transfer:
        transfer = super().write(agent, plan, notification)
        if plan.pieces and plan.pieces[-1].pool == self.target:
            self.spoil(self.target, plan.pieces[-1].target)
        return transfer


@pytest.fixture
def lossy() -> Iterator[tuple[Bench, Lossy]]:
    """A pair in this process, the receiving side on a thread."""
    registry = LocalRegistry()
    sides = SETTING.pools(0), SETTING.pools(1)
    sides[0].fill_randomly(1)
    writer, reader = Lossy("source", registry), LocalTransport("target", registry)
    writer.register(sides[0].addresses, generation=1, rank=0)
    peer = reader.register(sides[1].addresses, generation=1, rank=0)
    writer.connect(peer)
    warm(writer, peer.agent)
    orders, other = Pipe()

    def spoil(pool: str, offset: int) -> None:
        sides[1].pools[pool].view(-1)[offset] ^= 1

    writer.spoil = spoil

    def serve() -> None:
        with pytest.raises(EOFError):
            _serve(sides[1], reader, other, nap_s=0.0001)

    thread = threading.Thread(target=serve)
    thread.start()
    yield Bench(SETTING, sides[0], writer, peer, orders), writer
    orders.close()
    thread.join()
    other.close()


def test_an_honest_lane_is_measured(lossy: tuple[Bench, Lossy]) -> None:
    bench, _ = lossy
    assert [r.repetitions for r in bench.measure(600)] == [2] * 4


@pytest.mark.parametrize("pool", ["one-piece", "state"])
def test_one_wrong_byte_is_an_error_and_no_figure(lossy: tuple[Bench, Lossy], pool: str) -> None:
    bench, transport = lossy
    transport.target = pool
    with pytest.raises(TransferError, match=f"what landed in {pool} differs"):
        bench.measure(600)


def test_a_write_that_moved_nothing_is_an_error(lossy: tuple[Bench, Lossy]) -> None:
    """Also when the same bytes have landed at the same place before."""
    bench, _ = lossy
    units = {group.name: [1, 2] for group in tiny_layout().groups if group.unit == "block"}
    bench.whole(plan_push(tiny_layout(), source_blocks=[1, 2], target_blocks=[1, 2], first=0, last=2), units, units)
    with pytest.raises(TransferError, match="csa_kv"):
        bench.whole(TransferPlan(()), units, units)
