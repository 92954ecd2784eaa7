"""Whatever the order of pushes, cancels, failures and late bytes: drained is never said while a write is under way."""

from __future__ import annotations

import collections

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kv_transfer.landing import Landing, decode_notification
from kv_transfer.layout import KVLayout, make_group
from kv_transfer.local_transport import LocalRegistry, LocalTransport
from kv_transfer.plan import plan_push
from kv_transfer.writer import Writer, WriterEvent

from .conftest import addresses, make_landing, make_pools

LAYOUT = KVLayout(
    block_tokens=8,
    groups=(
        make_group("csa_kv", "block", [("rows", 1, 2, "fp32", 4)]),
        make_group("state", "slot", [("window", 1, 2, "fp32", 4)]),
    ),
)
BLOCKS = {1: (0, 5), 2: (1, 2), 3: (8, 3)}  # disjoint: each landing owns its blocks
keys = st.sampled_from(sorted(BLOCKS))


class WriterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.registry = LocalRegistry()
        self.pools = make_pools(LAYOUT, 1)
        self.prefill = LocalTransport("prefill", self.registry)
        self.prefill.register(addresses(LAYOUT, self.pools), generation=1, rank=0)
        self.decodes = [LocalTransport("decode", self.registry) for _ in range(2)]
        self.decode_pools = [make_pools(LAYOUT, None) for _ in self.decodes]
        self.endpoints = []
        for rank, transport in enumerate(self.decodes):
            pools = addresses(LAYOUT, self.decode_pools[rank])
            self.endpoints.append(transport.register(pools, generation=1, rank=rank))
            self.prefill.connect(self.endpoints[rank])
        self.now = 0.0
        self.writer = Writer(self.prefill, layout=LAYOUT, generation=1, clock=lambda: self.now)
        self.prefill.gate.on_notification = self.on_notification
        self.said: dict[tuple[str, int], list[str]] = collections.defaultdict(list)
        self.pushed: collections.Counter[int] = collections.Counter()
        self.answered: collections.Counter[int] = collections.Counter()
        self.cancels: collections.Counter[int] = collections.Counter()
        self.events: list[WriterEvent] = []

    def landing(self, key: int) -> Landing:
        agents = (endpoint.agent for endpoint in self.endpoints)
        return make_landing(LAYOUT, *agents, key=key, blocks=BLOCKS[key], slot=key)

    def writes_into(self, key: int) -> int:
        """Count the writes under way that touch blocks of a landing."""
        size = LAYOUT.groups[0].unit_bytes
        units = set()
        for transfer in self.registry.in_flight:
            base = transfer.peer.pool("csa_kv").base
            units |= {(int(address) - base) // size for address in transfer.ranges.target}
        return len(units & set(BLOCKS[key]))

    def on_notification(self, agent: str, message: bytes) -> list[bytes]:
        word = decode_notification(message)
        in_flight = self.writes_into(word.key)
        assert not in_flight or word.kind == "last", f"{word.kind} of {word.key} with {in_flight} writes under way"
        self.said[agent, word.key].append(word.kind)
        return [message]

    @rule(key=keys, block=st.integers(0, 1), is_last=st.booleans())
    def push(self, key: int, block: int, is_last: bool) -> None:
        landing = self.landing(key)
        plan = plan_push(
            LAYOUT,
            source_blocks=(6, 7),
            target_blocks=landing.block_ids,
            first=block,
            last=2 if is_last else block + 1,
            source_slot=1 if is_last else None,
            target_slot=landing.slot if is_last else None,
        )
        self.pushed[key] += 1
        self.writer.push(landing, plan, is_last=is_last, first_token=9)

    @rule(key=keys)
    def cancel(self, key: int) -> None:
        self.cancels[key] += 1
        self.writer.cancel(self.landing(key))

    @rule(pieces=st.integers(0, 3))
    def hold(self, pieces: int) -> None:
        self.prefill.gate.hold(pieces)

    @rule()
    def open(self) -> None:
        self.prefill.gate.open()

    @rule()
    def fail(self) -> None:
        self.prefill.gate.fail("planned failure")

    @rule()
    def wait(self) -> None:
        self.now += 1.5

    @rule(rank=st.integers(0, 1))
    def link_again(self, rank: int) -> None:
        self.prefill.connect(self.endpoints[rank])

    @rule()
    def pump(self) -> None:
        for event in self.writer.pump():
            self.events.append(event)
            if event.status in ("done", "failed"):
                self.answered[event.key] += 1
            else:
                assert not self.writes_into(event.key), f"{event.status} with writes under way"

    @invariant()
    def nothing_is_said_after_drained(self) -> None:
        for words in self.said.values():
            assert words in ([], ["last"], ["drained"], ["last", "drained"])

    @invariant()
    def bytes_stay_within_the_landings(self) -> None:
        owned = sorted(block for blocks in BLOCKS.values() for block in blocks)
        size = LAYOUT.groups[0].unit_bytes
        for pools in self.decode_pools:
            others = [b for b in range(pools["csa_kv"].size // size) if b not in owned]
            assert all((pools["csa_kv"][b * size : (b + 1) * size] == 0xEE).all() for b in others)

    def teardown(self) -> None:
        """With everything let through, every push is answered and every cancelled landing drained."""
        self.prefill.gate.open()
        for _ in range(3):
            self.pump()
        assert self.writer.is_idle
        assert not self.registry.in_flight
        assert self.answered == self.pushed
        for key in BLOCKS:
            ends = [event.status for event in self.events if event.key == key]
            lasts = [event for event in self.events if event.key == key and event.is_last and event.status == "done"]
            assert len(lasts) <= 1
            if self.cancels[key]:
                assert "drained" in ends or "undelivered" in ends
            if lasts:
                assert all(self.said[e.agent, key] == ["last"] for e in self.endpoints)


@pytest.mark.parametrize("steps", [25])
def test_drained_is_never_said_while_a_write_is_under_way(steps: int) -> None:
    run_state_machine_as_test(
        WriterMachine,
        settings=settings(
            max_examples=120, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
