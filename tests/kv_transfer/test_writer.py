"""Writer's state machine over LocalTransport with a gate."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kv_transfer.landing import Landing, Notification, decode_notification
from kv_transfer.layout import KVLayout
from kv_transfer.local_transport import Gate, LocalTransport
from kv_transfer.locality import host_id
from kv_transfer.plan import TransferPlan, manifest, plan_push
from kv_transfer.writer import Writer, WriterEvent

from .conftest import PATIENCE_S, Cluster, Side, assert_same_bytes, expected_after, make_landing

SOURCE_BLOCKS, SOURCE_SLOT = (11, 3, 4), 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """One prefill rank writing to `num_decodes` decode ranks."""

    def __init__(self, cluster: Cluster, *, num_decodes: int = 1, **options: Any) -> None:
        self.layout: KVLayout = cluster.layout
        self.prefill = cluster.side(1)
        self.decodes = [cluster.side(None, rank=rank) for rank in range(num_decodes)]
        for decode in self.decodes:
            self.prefill.transport.connect(decode.endpoint)
        self.clock = Clock()
        self.writer = Writer(self.prefill.transport, layout=self.layout, generation=3, clock=self.clock, **options)

    @property
    def gate(self) -> Gate:
        assert isinstance(self.prefill.transport, LocalTransport)
        return self.prefill.transport.gate

    def landing(self, **fields: Any) -> Landing:
        return make_landing(self.layout, *(side.endpoint.agent for side in self.decodes), **fields)

    def plan(self, landing: Landing, first: int, last: int, *, with_state: bool = False) -> TransferPlan:
        return plan_push(
            self.layout,
            source_blocks=SOURCE_BLOCKS,
            target_blocks=landing.block_ids,
            first=first,
            last=last,
            source_slot=SOURCE_SLOT if with_state else None,
            target_slot=landing.slot if with_state else None,
        )

    def push(self, landing: Landing, first: int, last: int) -> None:
        self.writer.push(landing, self.plan(landing, first, last))

    def push_last(self, landing: Landing, first: int = 2) -> None:
        self.writer.push(landing, self.plan(landing, first, 3, with_state=True), is_last=True, first_token=42)

    def pump(self) -> list[str]:
        return [event.status for event in self.writer.pump()]

    def words(self, decode: int = 0) -> list[Notification]:
        self.decodes[decode].poll()
        return [decode_notification(message) for message in self.decodes[decode].messages]

    def kinds(self, decode: int = 0) -> list[str]:
        return [word.kind for word in self.words(decode)]


@pytest.fixture
def rig(local_cluster: Cluster) -> Rig:
    return Rig(local_cluster)


@pytest.fixture
def wide(local_cluster: Cluster) -> Rig:
    return Rig(local_cluster, num_decodes=2)


def test_chunks_land_and_the_last_carries_manifest_and_first_token(rig: Rig) -> None:
    landing = rig.landing()
    whole = rig.plan(landing, 0, 3, with_state=True)
    expected = expected_after(whole, rig.prefill.pools, rig.decodes[0].pools)
    rig.push(landing, 0, 2)
    assert rig.pump() == ["done"]
    assert rig.kinds() == []
    rig.push_last(landing)
    (event,) = rig.writer.pump()
    assert (event.status, event.is_last, event.key, event.generation) == ("done", True, 1, 7)
    assert_same_bytes(rig.decodes[0].pools, expected)
    (word,) = rig.words()
    assert word == Notification(
        kind="last",
        key=1,
        generation=7,
        writer_rank=0,
        writer_generation=3,
        first_token=42,
        num_tokens=landing.num_tokens,
        manifest=manifest(rig.layout, landing.num_tokens),
        sent_at=rig.clock(),
        sent_by=host_id(),
    )
    assert rig.writer.is_idle and rig.writer.num_open == 0


def test_checksums_ride_on_the_last_word_only(rig: Rig) -> None:
    landing = rig.landing()
    rig.push(landing, 0, 2)
    sums = {group.name: number for number, group in enumerate(rig.layout.groups)}
    plan = rig.plan(landing, 2, 3, with_state=True)
    rig.writer.push(landing, plan, is_last=True, first_token=42, checksums=sums)
    assert rig.pump() == ["done", "done"]
    (word,) = rig.words()
    assert {group.name: group.checksum for group in word.manifest} == sums


def test_what_is_exposed_counts_from_the_order_of_the_last_push(rig: Rig) -> None:
    landing = rig.landing()
    rig.gate.hold()
    rig.push(landing, 0, 2)
    rig.pump()
    rig.push_last(landing)
    rig.clock.now += 0.25
    rig.gate.open()
    first, last = rig.writer.pump()
    assert (first.seconds, first.exposed_seconds) == (0.25, 0.0)
    assert (last.seconds, last.exposed_seconds) == (0.0, 0.25)


def test_the_same_over_nixl(nixl_cluster: Cluster) -> None:
    rig = Rig(nixl_cluster, num_decodes=2)
    landing = rig.landing()
    expected = expected_after(rig.plan(landing, 0, 3, with_state=True), rig.prefill.pools, rig.decodes[0].pools)
    rig.push(landing, 0, 1)
    rig.push(landing, 1, 2)
    rig.push_last(landing)
    events: list[WriterEvent] = []
    until = time.monotonic() + PATIENCE_S
    while not (all([rig.words(0), rig.words(1)]) and len(events) == 3) and time.monotonic() < until:
        events += rig.writer.pump()
    assert [(event.status, event.is_last) for event in events] == [("done", False), ("done", False), ("done", True)]
    for decode in (0, 1):
        assert rig.kinds(decode) == ["last"]
        assert_same_bytes(rig.decodes[decode].pools, expected)


def test_the_last_write_waits_for_all_earlier_ones_everywhere(wide: Rig) -> None:
    landing = wide.landing()
    num_pieces = len(wide.plan(landing, 0, 2).pieces)
    wide.gate.hold(2 * num_pieces - 1)  # one piece of the second destination is missing
    wide.push(landing, 0, 2)
    wide.push_last(landing)
    assert wide.pump() == []
    wide.gate.hold(0)
    assert wide.pump() == []
    assert wide.kinds(0) == wide.kinds(1) == []
    wide.gate.open()
    assert wide.pump() == ["done", "done"]
    assert wide.kinds(0) == wide.kinds(1) == ["last"]


def test_done_counts_bytes_pieces_and_seconds_over_all_destinations(wide: Rig) -> None:
    landing = wide.landing()
    plan = wide.plan(landing, 0, 2)
    wide.gate.hold()
    wide.push(landing, 0, 2)
    wide.pump()
    wide.clock.now += 0.5
    wide.gate.open()
    (event,) = wide.writer.pump()
    assert (event.num_bytes, event.num_pieces, event.seconds) == (2 * plan.num_bytes, 2 * len(plan.pieces), 0.5)


def test_a_failed_write_voids_the_landing_and_then_says_drained(rig: Rig) -> None:
    landing = rig.landing()
    rig.gate.hold(1)
    rig.push(landing, 0, 2)
    rig.push_last(landing)
    rig.pump()
    rig.gate.fail("cable pulled")
    failed, dropped, drained = rig.writer.pump()
    assert (failed.status, dropped.status, drained.status) == ("failed", "failed", "drained")
    assert "cable pulled" in failed.error and "dropped" in dropped.error and dropped.is_last
    assert rig.kinds() == ["drained"]
    rig.gate.open()
    rig.push_last(landing, first=0)
    (refused,) = rig.writer.pump()
    assert refused.status == "failed" and "refused" in refused.error
    assert rig.kinds() == ["drained"]


def test_a_failure_at_one_destination_is_drained_only_after_the_other_has_ended(
    wide: Rig, local_cluster: Cluster
) -> None:
    landing = wide.landing()
    wide.gate.hold(1)
    wide.push(landing, 0, 2)
    wide.pump()
    wide.decodes[0].transport.close()
    assert wide.pump() == ["failed"]
    assert wide.pump() == [] and wide.kinds(1) == []
    assert not wide.writer.is_idle
    wide.gate.open()
    (event,) = wide.writer.pump()
    assert event.status == "undelivered" and wide.decodes[0].endpoint.agent in event.error
    assert wide.kinds(1) == ["drained"]


def test_cancel_starts_nothing_more_and_waits_for_what_is_under_way(rig: Rig) -> None:
    landing = rig.landing()
    before = {name: array.copy() for name, array in rig.decodes[0].pools.items()}
    rig.gate.hold(1)
    rig.push(landing, 0, 1)
    rig.push_last(landing, first=1)
    rig.pump()
    rig.writer.cancel(landing)
    assert rig.pump() == ["failed"]  # the last, dropped
    assert rig.kinds() == [] and not rig.writer.is_idle
    rig.gate.open()
    assert rig.pump() == ["done", "drained"]
    assert rig.kinds() == ["drained"]
    only_first = expected_after(rig.plan(landing, 0, 1), rig.prefill.pools, before)
    assert_same_bytes(rig.decodes[0].pools, only_first)


def test_cancelling_an_unknown_landing_says_drained_and_refuses_its_late_pushes(rig: Rig) -> None:
    landing = rig.landing()
    rig.writer.cancel(landing)
    assert rig.pump() == ["drained"]
    rig.push(landing, 0, 2)
    assert rig.pump() == ["failed"]
    assert rig.kinds() == ["drained"]
    before = {name: array.copy() for name, array in rig.decodes[0].pools.items()}
    assert all((array == 0xEE).all() for array in before.values())


def test_cancel_after_the_last_is_answered_without_sending_again(rig: Rig) -> None:
    landing = rig.landing()
    rig.push_last(landing, first=0)
    assert rig.pump() == ["done"]
    rig.writer.cancel(landing)
    assert rig.pump() == ["drained"]
    assert rig.kinds() == ["last"]


def test_cancel_while_the_last_is_under_way_does_not_contradict_it(rig: Rig) -> None:
    landing = rig.landing()
    rig.gate.hold(1)
    rig.push_last(landing, first=0)
    rig.pump()
    rig.writer.cancel(landing)
    assert rig.pump() == []
    rig.gate.open()
    assert rig.pump() == ["done", "drained"]
    assert rig.kinds() == ["last"]


def test_every_cancel_is_answered_but_drained_is_sent_once(rig: Rig) -> None:
    landing = rig.landing()
    for _ in range(3):
        rig.writer.cancel(landing)
        assert rig.pump() == ["drained"]
    assert rig.kinds() == ["drained"]


def test_drained_that_can_not_be_sent_is_reported_undelivered_each_time(rig: Rig) -> None:
    landing = rig.landing()
    rig.prefill.transport.disconnect(rig.decodes[0].endpoint.agent)
    rig.writer.cancel(landing)
    (event,) = rig.writer.pump()
    assert event.status == "undelivered" and "not connected" in event.error
    rig.writer.cancel(landing)
    assert rig.pump() == ["undelivered"]


def test_a_missed_deadline_fails_at_once_but_drains_only_when_the_bytes_have_stopped(rig: Rig) -> None:
    landing = rig.landing()
    rig.gate.hold(1)
    rig.push(landing, 0, 2)
    rig.pump()
    rig.clock.now += 0.9
    assert rig.pump() == []
    rig.clock.now += 0.2
    (event,) = rig.writer.pump()
    assert event.status == "failed" and "deadline" in event.error
    assert event.cause == "deadline"
    rig.clock.now += 1000
    assert rig.pump() == [] and not rig.writer.is_idle
    rig.gate.open()
    assert rig.pump() == ["undelivered"]  # its peer was disconnected
    assert rig.writer.is_idle and rig.kinds() == []


def test_a_deadline_grows_with_the_bytes_under_way(local_cluster: Cluster) -> None:
    rig = Rig(local_cluster, bandwidth=1000.0, deadline_factor=4.0)
    landing = rig.landing()
    allowed = 4.0 * rig.plan(landing, 0, 2).num_bytes / 1000.0
    rig.gate.hold()
    rig.push(landing, 0, 2)
    assert rig.pump() == []
    rig.clock.now += allowed - 0.01
    assert rig.pump() == []
    rig.clock.now += 0.02
    assert rig.pump() == ["failed"]


def test_landings_do_not_wait_for_each_other(rig: Rig) -> None:
    slow, quick = rig.landing(key=1), rig.landing(key=2, blocks=(0, 1, 2), slot=3)
    rig.gate.hold(1)
    rig.push(slow, 0, 3)
    rig.pump()
    rig.gate.hold(len(rig.plan(quick, 0, 3, with_state=True).pieces) + 100)
    rig.gate.open()
    rig.push_last(quick, first=0)
    statuses = [(event.key, event.status) for event in rig.writer.pump()]
    assert (2, "done") in statuses


def test_an_incomplete_last_is_not_sent(rig: Rig) -> None:
    landing = rig.landing()
    rig.push(landing, 0, 1)
    rig.push_last(landing, first=2)  # block 1 was never pushed
    done, failed, drained = rig.writer.pump()
    assert (done.status, failed.status, drained.status) == ("done", "failed", "drained")
    assert "'csa_kv' incomplete: 1 of 3" in failed.error
    assert rig.kinds() == ["drained"]


def test_a_last_without_the_state_record_is_not_sent(rig: Rig) -> None:
    landing = rig.landing()
    rig.writer.push(landing, rig.plan(landing, 0, 3), is_last=True, first_token=1)
    failed, _ = rig.writer.pump()
    assert "'state' incomplete: 1 of 1" in failed.error
    assert rig.kinds() == ["drained"]


def test_a_plan_into_foreign_blocks_is_never_written(rig: Rig) -> None:
    landing, other = rig.landing(), rig.landing(blocks=(0, 1, 2))
    rig.writer.push(landing, rig.plan(other, 0, 2))
    failed, _ = rig.writer.pump()
    assert "unit 0 of 'csa_kv' does not belong to landing 1" in failed.error
    assert failed.cause == "refused"
    assert all((array == 0xEE).all() for array in rig.decodes[0].pools.values())


def test_a_landing_of_another_layout_is_refused(rig: Rig) -> None:
    landing = rig.landing(layout="0123456789abcdef")
    rig.push(landing, 0, 1)
    failed, _ = rig.writer.pump()
    assert "layout 0123456789abcdef" in failed.error


def test_a_landing_of_a_restarted_group_fails_by_its_unknown_agent(rig: Rig) -> None:
    stale = make_landing(rig.layout, "decode.r0.gdead", generation=6)
    rig.push(stale, 0, 1)
    failed, undelivered = rig.writer.pump()
    assert failed.generation == 6 and "decode.r0.gdead is not connected" in failed.error
    assert undelivered.status == "undelivered"
    assert rig.kinds() == []


def test_keys_of_two_generations_are_different_landings(rig: Rig) -> None:
    rig.writer.cancel(rig.landing(generation=6))
    rig.push_last(rig.landing(generation=7), first=0)
    assert [(event.generation, event.status) for event in rig.writer.pump()] == [(6, "drained"), (7, "done")]


def test_a_rank_without_destinations_answers_all_the_same(local_cluster: Cluster) -> None:
    rig = Rig(local_cluster, rank=2, num_ranks=4)
    landing = rig.landing()
    rig.push(landing, 0, 2)
    rig.push_last(landing)
    events = rig.writer.pump()
    assert [(event.status, event.num_bytes) for event in events] == [("done", 0), ("done", 0)]
    rig.writer.cancel(rig.landing(key=2))
    assert rig.pump() == ["drained"]
    assert rig.kinds() == []


def test_a_rank_writes_to_its_own_share_of_the_decode_ranks(local_cluster: Cluster) -> None:
    rig = Rig(local_cluster, num_decodes=3, rank=1, num_ranks=2)
    rig.push_last(rig.landing(), first=0)
    assert rig.pump() == ["done"]
    assert [rig.kinds(decode) for decode in range(3)] == [[], ["last"], []]


def test_the_memory_of_ended_landings_is_bounded(local_cluster: Cluster) -> None:
    rig = Rig(local_cluster, remember=10)
    for key in range(50):
        rig.writer.cancel(rig.landing(key=key))
        rig.pump()
    assert len(rig.writer._over) == 10
    rig.push(rig.landing(key=49), 0, 1)
    assert rig.pump() == ["failed"]


def test_a_duplicated_last_reaches_decode_twice_and_says_the_same(rig: Rig) -> None:
    rig.gate.on_notification = lambda agent, message: [message, message]
    rig.push_last(rig.landing(), first=0)
    rig.pump()
    first, second = rig.words()
    assert first == second


def test_a_late_write_lands_only_in_its_own_blocks_before_drained(rig: Rig) -> None:
    """The next owner of other blocks is untouched, whenever the bytes come."""
    late, owner = rig.landing(key=1), rig.landing(key=2, blocks=(0, 1, 2), slot=3)
    decode: Side = rig.decodes[0]
    rig.gate.hold(1)
    rig.push(late, 0, 3)
    rig.pump()
    rig.writer.cancel(late)
    rig.pump()
    rig.gate.open()
    before = {name: array.copy() for name, array in decode.pools.items()}
    rig.push_last(owner, first=0)
    rig.pump()
    expected = expected_after(rig.plan(owner, 0, 3, with_state=True), rig.prefill.pools, before)
    expected = expected_after(rig.plan(late, 0, 3), rig.prefill.pools, expected)
    assert_same_bytes(decode.pools, expected)
    assert sorted((word.key, word.kind) for word in rig.words()) == [(1, "drained"), (2, "last")]
