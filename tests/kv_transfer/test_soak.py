"""Thousands of transfers between two processes, a fault every fifty: nothing corrupt, nothing leaked, nothing grows.

The content of every unit names the request that it belongs to, and blocks given back are watched for late writes.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .conftest import Lane, lanes, require_lane
from .soak_conductor import FAULTS, NUM_AT_ONCE, Soak
from .soak_content import NUM_BLOCKS, NUM_SLOTS

NUM_TRANSFERS = int(os.environ.get("ISTHMUS_SOAK_TRANSFERS", 10_000))
IDLE_S = float(os.environ.get("ISTHMUS_IDLE_S", 600))
BYTES_ALLOWED, FDS_ALLOWED, DEATHS_A_FD = 4 << 20, 4, 4
"""Growth over the last life of a process, thousands of transfers: a leaked kilobyte a transfer would be 6 MiB of the
writer. UCX itself keeps a descriptor of one in six to fifteen peers that were killed."""

NIXL, NIXL_TCP, HOST, UCXX = Lane("nixl", "all"), Lane("nixl", "tcp,self"), Lane("host", "all"), Lane("ucxx", "all")
NIXL_GPU, HOST_GPU = Lane("nixl", "all", "VRAM"), Lane("host", "all", "VRAM")

Start = Callable[..., Soak]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield what starts a soak of a lane."""
    started: list[Soak] = []

    def start(lane: Lane, **words: Any) -> Soak:
        require_lane(lane)
        started.append(Soak(lane, **words))
        return started[-1]

    yield start
    for soak in started:
        soak.close()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print through pytest, for tests that take minutes."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    return say


def assert_nothing_left(states: dict[str, dict[str, int]]) -> None:
    everything = {"free_blocks": NUM_BLOCKS, "free_slots": NUM_SLOTS, "held": 0}
    assert {role: {key: state[key] for key in everything} for role, state in states.items()} == {
        "prefill": everything,
        "decode": everything,
    }


@pytest.mark.parametrize("lane", lanes(NIXL, HOST, NIXL_GPU, HOST_GPU))
def test_a_few_transfers_survive_two_faults(lane: Lane, start: Start) -> None:
    soak = start(lane, total=60, fault_at={20: "receiver killed", 40: "connection broken"})
    soak.run(60)
    states = soak.settle()
    assert soak.corrupt == []
    assert_nothing_left(states)
    assert soak.counts.landed >= 60 - 4 * NUM_AT_ONCE, soak.counts
    assert soak.leave() == {"prefill": 0, "decode": 0}


@pytest.mark.parametrize("lane", lanes(NIXL, HOST, NIXL_GPU, HOST_GPU))
def test_nothing_lands_after_a_broken_connection_has_failed_a_write(lane: Lane, start: Start) -> None:
    """NIXL tells the failure while copies wait in UCX: of one in twenty writes that lose their connection."""
    total = 300
    soak = start(lane, total=total, fault_at=dict.fromkeys(range(10, total, 5), "connection broken"))
    soak.run(total)
    soak.settle()
    assert soak.corrupt == []


def each_fault_twice(total: int) -> dict[int, str]:
    """Return all faults in turn, and once more, as far apart as they can be."""
    step = total // (2 * len(FAULTS) + 1)
    return {step * place: fault for place, fault in enumerate(2 * FAULTS, start=1)}


@pytest.mark.gpu
@pytest.mark.parametrize("lane", lanes(NIXL_GPU, HOST_GPU))
def test_pools_in_gpu_memory_survive_every_fault_twice(lane: Lane, start: Start, say: Callable[[str], None]) -> None:
    total = 300
    soak = start(lane, total=total, fault_at=each_fault_twice(total))
    soak.run(total)
    states = soak.settle()
    say(f"{'-'.join(lane)} over {', '.join(sorted(soak.lanes))}: {soak.counts}")
    assert soak.corrupt == []
    assert_nothing_left(states)
    assert soak.lanes <= lane.expected
    assert soak.counts.faults == dict.fromkeys(FAULTS, 2)
    assert soak.counts.landed >= total - 2 * len(FAULTS) * 2 * NUM_AT_ONCE, soak.counts
    assert soak.leave() == {"prefill": 0, "decode": 0}


def all_faults(total: int, rng: random.Random) -> dict[int, str]:
    """Return a fault for every fiftieth transfer. Later on nobody is killed, so that a life is long enough to grow."""
    faults = {}
    for number in range(50, total, 50):
        allowed = FAULTS if number < total / 3 else FAULTS[1:] if number < total * 2 / 3 else FAULTS[2:]
        faults[number] = rng.choice(allowed)
    return faults


@pytest.mark.long
@pytest.mark.parametrize("lane", lanes(NIXL, NIXL_TCP, HOST, UCXX))
def test_ten_thousand_transfers_survive_a_fault_every_fifty(
    lane: Lane, start: Start, say: Callable[[str], None]
) -> None:
    soak = start(lane, total=NUM_TRANSFERS, fault_at=all_faults(NUM_TRANSFERS, random.Random(8)))
    soak.run(NUM_TRANSFERS, report=say)
    states = soak.settle()
    say(f"{lane[0]} over {', '.join(sorted(soak.lanes))}: {soak.counts}")
    assert soak.corrupt == []
    assert_nothing_left(states)
    assert soak.counts.landed >= 0.9 * NUM_TRANSFERS, soak.counts
    for role, samples in soak.samples.items():
        begun, warm = next((begun, state) for begun, state in samples if begun >= NUM_TRANSFERS / 20)
        growth = {key: states[role][key] - warm[key] for key in ("bytes", "fds")}
        say(
            f"{lane[0]} {role}, over {samples[-1][0] - begun:,} transfers of one life: {warm['bytes'] / 2**20:.1f} MiB "
            f"{growth['bytes'] / 2**20:+.2f}, {warm['fds']} descriptors {growth['fds']:+}"
        )
        fds_allowed = FDS_ALLOWED + soak.counts.faults["receiver killed"] // DEATHS_A_FD
        assert growth["bytes"] <= BYTES_ALLOWED and growth["fds"] <= fds_allowed, f"{role} grew: {samples}"
    assert soak.leave() == {"prefill": 0, "decode": 0}


@pytest.mark.long
def test_pairs_that_were_idle_for_ten_minutes_still_transfer(start: Start, say: Callable[[str], None]) -> None:
    pairs = {}
    for lane in (NIXL, NIXL_TCP, HOST, UCXX):
        with contextlib.suppress(pytest.skip.Exception):
            pairs[" ".join(lane)] = start(lane, total=2, fault_at={})
    for pair in pairs.values():
        pair.run(1)
    until = time.monotonic() + IDLE_S
    while (left := until - time.monotonic()) > 0:
        say(f"{', '.join(pairs)}: idle for another {left:.0f} s")
        time.sleep(min(60.0, left))  # being idle is what is tested
    for pair in pairs.values():
        pair.run(2)
    assert pairs and {name: (pair.counts.landed, pair.corrupt) for name, pair in pairs.items()} == {
        name: (2, []) for name in pairs
    }
