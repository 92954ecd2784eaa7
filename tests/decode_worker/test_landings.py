"""Landings: who owns the blocks at every moment, and that nothing is freed while a writer may still write."""

import pytest

from decode_worker.landings import ASK_WRITER_S, WRITER_LOST_GRACE_S, Landed, LandingFailed, LandingTable
from engine.block_allocator import BlockAllocator, SlotAllocator
from engine.errors import InvalidRequest, NoCapacity
from kv_transfer.landing import Landing, Notification
from kv_transfer.layout import KVLayout, make_group
from kv_transfer.plan import manifest
from router.protocol import ReserveRequest, SamplingParams

LAYOUT = KVLayout(
    block_tokens=128,
    groups=(
        make_group("csa_kv", "block", [("csa_kv", 2, 32, "fp32", 16)]),
        make_group("state", "slot", [("window", 3, 128, "fp32", 16)]),
    ),
)
GENERATION, WRITER = 77, 55


class Books:
    def __init__(self, *, ranks: int = 1, blocks: int = 10, slots: int = 4) -> None:
        self.blocks, self.slots = BlockAllocator(blocks), SlotAllocator(slots)
        self.table = LandingTable(
            LAYOUT,
            blocks=self.blocks,
            slots=self.slots,
            generation=GENERATION,
            max_model_len=2000,
            leader_url="http://decode",
        )
        self.table.agents = tuple(f"decode.{r}" for r in range(ranks))

    def reserve(self, name: str = "a", *, tokens: int = 200, max_tokens: int = 10, timeout_s: float = 5.0) -> Landing:
        return self.table.reserve(
            ReserveRequest(
                request_id=name,
                prompt_token_ids=[3] * tokens,
                sampling=SamplingParams(max_tokens=max_tokens),
                timeout_s=timeout_s,
                writer_generation=WRITER,
                writer_url="http://prefill",
            ),
            0.0,
        )

    def is_all_free(self) -> bool:
        return (self.blocks.num_free, self.blocks.num_promised) == (self.blocks.num_blocks, 0) and (
            self.slots.num_free == self.slots.num_slots
        )


def _last(landing: Landing, **changes: object) -> Notification:
    fields: dict[str, object] = dict(
        kind="last",
        key=landing.key,
        generation=landing.generation,
        writer_rank=0,
        writer_generation=WRITER,
        first_token=9,
        num_tokens=landing.num_tokens,
        manifest=manifest(LAYOUT, landing.num_tokens),
    )
    return Notification(**{**fields, **changes})  # type: ignore[arg-type]


def _drained(landing: Landing) -> Notification:
    return _last(landing, kind="drained", first_token=-1, num_tokens=0, manifest=())


def test_reservation_holds_the_prompt_and_promises_the_growth() -> None:
    books = Books()
    landing = books.reserve(tokens=250, max_tokens=300)
    assert len(landing.block_ids) == 2
    assert books.blocks.num_promised == 5 - 2  # 549 tokens are cached at most: the last is never fed back
    assert landing.leader_url == "http://decode" and landing.agents == ("decode.0",)


def test_reservation_that_can_not_grow_to_its_end_is_refused_whole() -> None:
    books = Books(blocks=4)
    with pytest.raises(NoCapacity):
        books.reserve(tokens=250, max_tokens=300)
    assert books.is_all_free()


def test_same_request_can_not_hold_two_landings() -> None:
    books = Books()
    books.reserve()
    with pytest.raises(InvalidRequest, match="has a landing already"):
        books.reserve()


def test_landing_is_taken_only_when_every_rank_is_complete() -> None:
    books = Books(ranks=2)
    landing = books.reserve()
    assert books.table.on_notification(0, _last(landing)) is None
    outcome = books.table.on_notification(1, _last(landing))
    assert isinstance(outcome, Landed) and outcome.held.first_token == 9
    assert books.table.num_held == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"manifest": ()},
        {"manifest": manifest(LAYOUT, 100)},
        {"manifest": manifest(LAYOUT, 200)[:1]},
        {"num_tokens": 199},
        {"first_token": -1},
    ],
)
def test_incomplete_cache_never_becomes_a_sequence(changes: dict[str, object]) -> None:
    books = Books()
    landing = books.reserve()
    outcome = books.table.on_notification(0, _last(landing, **changes))
    assert isinstance(outcome, LandingFailed) and outcome.request_id == "a"
    assert books.is_all_free()  # the word "last" also means drained


def test_ranks_that_disagree_on_the_first_token_fail_the_landing() -> None:
    books = Books(ranks=2)
    landing = books.reserve()
    books.table.on_notification(0, _last(landing))
    assert isinstance(books.table.on_notification(1, _last(landing, first_token=10)), LandingFailed)
    assert books.is_all_free()


def test_cancelled_landing_keeps_blocks_until_writer_drained() -> None:
    books = Books(ranks=2)
    landing = books.reserve()
    assert books.table.abort("a", drained=False)
    assert books.table.expire(1e9) == []
    assert books.table.quarantined_blocks == 2
    assert books.table.on_notification(0, _drained(landing)) is None
    assert books.table.quarantined_blocks == 2
    books.table.on_notification(1, _last(landing))
    assert books.is_all_free()


def test_landing_that_nobody_was_told_of_is_free_at_once() -> None:
    books = Books()
    books.reserve()
    books.table.abort("a", drained=True)
    assert books.is_all_free()


def test_deadline_fails_the_request_but_frees_nothing() -> None:
    books = Books()
    landing = books.reserve(timeout_s=5.0)
    assert books.table.expire(4.9) == []
    [failure] = books.table.expire(5.0)
    assert failure.is_deadline and "phase: transfer" in failure.reason
    assert books.table.quarantined_blocks == 2
    books.table.on_notification(0, _last(landing))
    assert books.is_all_free()


def test_writer_that_gives_up_fails_an_open_landing() -> None:
    books = Books()
    landing = books.reserve()
    assert isinstance(books.table.on_notification(0, _drained(landing)), LandingFailed)
    assert books.is_all_free()


def test_drained_over_http_frees_what_no_notification_could() -> None:
    books = Books(ranks=2)
    landing = books.reserve()
    books.table.abort("a", drained=False)
    assert books.table.on_drained(landing.key, GENERATION) is None
    assert books.is_all_free()


def test_words_of_another_life_or_said_twice_are_dropped_and_counted() -> None:
    books = Books(ranks=2)
    landing = books.reserve()
    assert books.table.on_notification(0, _last(landing, generation=GENERATION - 1)) is None
    assert books.table.num_stale == 1, "or it has been taken for rank 0's word"
    assert books.table.on_notification(0, _last(landing, key=99)) is None
    books.table.on_drained(landing.key, GENERATION - 1)
    books.table.on_notification(0, _last(landing))
    assert books.table.on_notification(0, _last(landing)) is None  # twice from rank 0 is not rank 1
    assert books.table.num_stale == 4
    assert books.table.num_open == 1


def test_dead_writer_frees_its_landings_after_a_grace_and_no_others() -> None:
    books = Books()
    books.reserve("a")
    books.table.reserve(
        ReserveRequest(
            request_id="b", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1), writer_generation=WRITER + 1
        ),
        0.0,
    )
    [failure] = books.table.writer_lost(WRITER, 10.0)
    assert failure.request_id == "a"
    books.table.expire(10.0 + WRITER_LOST_GRACE_S / 2)
    assert books.table.quarantined_blocks == 2
    books.table.expire(10.0 + WRITER_LOST_GRACE_S)
    assert books.table.quarantined_blocks == 0
    assert books.table.open_requests() == ["b"]


def test_landing_of_a_writer_that_is_dead_already_ends_and_is_free_after_the_grace() -> None:
    """A router that does not know of the death yet reserves for it, or has reserved and aborts after the news."""
    books = Books()
    books.reserve("before")
    books.table.writer_lost(WRITER, 10.0)
    books.table.writer_lost(WRITER, 10.9)  # told again: the grace does not begin anew
    books.reserve("after")
    books.table.abort("after", drained=False)
    books.reserve("late")
    assert [f.request_id for f in books.table.expire(10.0 + WRITER_LOST_GRACE_S / 2)] == ["late"]
    assert books.table.quarantined_blocks == 6
    books.table.expire(10.0 + WRITER_LOST_GRACE_S)
    assert books.is_all_free()


def test_growth_promised_to_a_cancelled_landing_is_free_before_its_blocks_are() -> None:
    books = Books()
    books.reserve(tokens=100, max_tokens=1000)
    books.table.abort("a", drained=False)
    assert books.blocks.num_promised == 0
    assert books.blocks.available == 9


def test_writer_of_a_quarantined_landing_is_asked_until_it_has_spoken() -> None:
    books = Books()
    books.reserve("running")
    landing = books.reserve("left")
    books.table.abort("left", drained=False)
    assert books.table.to_ask(0.0) == []
    for now in (ASK_WRITER_S, 2 * ASK_WRITER_S):
        assert [held.landing.key for held in books.table.to_ask(now)] == [landing.key]
        assert books.table.to_ask(now + 0.1) == []
    books.table.on_drained(landing.key, landing.generation)
    assert books.table.to_ask(4 * ASK_WRITER_S) == []
