"""Faults planted between a prefill and a decode group: not one token may come out of incomplete or foreign cache.

Everything but the network is real, pools are full of NaN, and what comes out is compared with one runner that serves
the same request alone. In the end every block and slot is free again.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from engine.errors import NoCapacity
from engine.seams import Fault
from kv_transfer import landing as kv_landing
from kv_transfer.transport import TransferError, TransferStatus
from router.protocol import AbortRequest, DrainedNotice, WriterLost

HERE = Path(__file__).parent
TINY = HERE.parent / "oracle" / "tiny"
TOLERANCE = 1e-4
BLOCK = 128
PIECES_OF_A_BLOCK = 3


def _pair_module():
    if "cluster_pair" not in sys.modules:
        spec = importlib.util.spec_from_file_location("cluster_pair", HERE / "pair.py")
        sys.modules["cluster_pair"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["cluster_pair"])
    return sys.modules["cluster_pair"]


pair_module = _pair_module()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_pair(**options):
    """Blocks of 128 tokens, chunks of one block, at decode ten blocks: the setup of case PD-01."""
    chosen = {"block_size": BLOCK, "chunk": BLOCK, "decode_blocks": 10, "prefill_blocks": 24, **options}
    pair = pair_module.Pair(TINY, max_model_len=10 * BLOCK, **chosen)
    pair.prefill.poison()
    pair.decode.poison()
    return pair


@pytest.fixture(scope="module")
def colocated():
    return pair_module.Colocated(make_pair().prefill.config)


def prompt_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(2, 384) for _ in range(length)]


def assert_right(pair, request, colocated):
    tokens, logits = colocated.generate(request.prompt, request.params.max_tokens)
    assert request.errors == []
    assert request.tokens == tokens
    assert pair_module.distance(pair.logits_of(request), logits) < TOLERANCE


def assert_serves(pair, colocated, *, name="canary", length=200):
    """A request that comes afterwards is served as if nothing had been."""
    request = pair.send(name, prompt_of(99, length), 3)
    pair.run_until(lambda: request.is_over and pair.prefill.worker.is_idle)
    assert_right(pair, request, colocated)


def let_time_pass(pair, seconds):
    """Both leaders look at their deadlines as if it were so much later."""
    now = time.monotonic() + seconds
    pair.prefill.worker.tick(now)
    pair.decode.worker.tick(now)


# ---------------------------------------------------------------- PD-01: writes that come late


def wait_is_needed(pair, rounds):
    """B asks again and again, and is refused as long as A's blocks are not proven quiet."""
    for _ in range(rounds):
        pair.step()
        with pytest.raises(NoCapacity):
            pair.reserve("probe", prompt_of(2, 8 * BLOCK - 20), 3)


def hold_a(pair, rng):
    """Send A and hold its transfer in the middle: about 4 of 8 blocks are at decode."""
    pair.gate.hold(rng.randrange(3 * PIECES_OF_A_BLOCK, 5 * PIECES_OF_A_BLOCK))
    a = pair.send(f"a{len(pair.requests)}", prompt_of(1, 8 * BLOCK - 20), 3, timeout_s=50.0)
    pair.run_until(lambda: pair.is_held)
    for _ in range(rng.randrange(6)):
        pair.step()
    return a


def finish_b(pair, colocated):
    """B has A's blocks now. What prefill had in its blocks is what decode has before its first step."""
    b = pair.reserve(f"b{len(pair.requests)}", prompt_of(2, 8 * BLOCK - 20), 3)
    pair.decode.worker.seams.arm(Fault(point="kv_notified_before_first_token", request=b.name))
    pair.start(b)
    pair.run_until(lambda: pair.decode.worker.seams.reached() and pair.prefill.worker.is_idle)
    source, layout = pair.prefill.sources[b.name], pair.decode.plan.layout
    for runner in pair.decode.runners:
        for group in layout.groups:
            ours, theirs = pair.prefill.runner.cache.pools[group.name], runner.cache.pools[group.name]
            if group.unit == "block":
                assert torch.equal(ours[source.block_ids], theirs[list(b.landing.block_ids)]), group.name
            else:
                assert torch.equal(ours[source.slot], theirs[b.landing.slot]), group.name
    pair.decode.worker.seams.release()
    pair.run_until(lambda: b.is_over)
    assert_right(pair, b, colocated)


def ack_arrives(pair, rng):
    a = hold_a(pair, rng)
    assert not pair.leave(a).drained
    wait_is_needed(pair, 1 + rng.randrange(8))
    pair.gate.open()
    pair.run_until(lambda: not pair.decode.worker.landings.num_held)
    return a


def ack_lost(pair, rng):
    pair.gate.on_notification = lambda agent, word: [word] * (kv_landing.decode_notification(word).kind != "drained")
    a = hold_a(pair, rng)
    pair.leave(a)
    wait_is_needed(pair, 1 + rng.randrange(4))
    pair.may_ask = False
    let_time_pass(pair, 1e6)
    let_time_pass(pair, 2e6)  # asked, but no answer: no time is long enough
    wait_is_needed(pair, 1)
    pair.may_ask = True
    let_time_pass(pair, 3e6)  # asked, and the writer says that it is still writing
    wait_is_needed(pair, 1)
    assert len(pair.asked) == 2
    pair.gate.open()
    pair.settle()
    wait_is_needed(pair, 1)
    let_time_pass(pair, 4e6)
    pair.gate.on_notification = lambda agent, word: [word]
    return a


def prefill_killed_while_held(pair, rng):
    a = hold_a(pair, rng)
    (stray,) = pair.registry.in_flight
    generation = pair.prefill.generation
    if rng.randrange(2):
        # The router has found out first, and ends the request with what it knows: nothing.
        pair.decode.worker.abort(AbortRequest(request_id=a.name, drained=False))
    pair.decode.worker.writer_lost(WriterLost(generation=generation))
    told = time.monotonic()
    let_time_pass(pair, 0.9)
    with pytest.raises(NoCapacity):
        pair.reserve("probe", prompt_of(2, 8 * BLOCK - 20), 3)
    pair.gate.hold(rng.randrange(1, 6))
    pair.prefill.transport.check(stray)  # what the dead writer's kernel had taken over arrives within the grace
    assert time.monotonic() - told < 0.9
    pair.restart_prefill()
    let_time_pass(pair, 1.1)
    return a


def abort_by_decode_timeout(pair, rng):
    a = hold_a(pair, rng)
    let_time_pass(pair, 51)
    pair.settle()
    assert [e for e in a.errors if "phase: transfer" in e] and not a.decoded
    wait_is_needed(pair, 1 + rng.randrange(4))
    pair.leave(a)
    wait_is_needed(pair, 1 + rng.randrange(4))
    pair.gate.open()
    pair.run_until(lambda: not pair.decode.worker.landings.num_held)
    return a


def two_decode_ranks_abort(pair, rng):
    """Rank 0 hears that A is drained long before rank 1 does."""
    late, first = [], pair.decode.endpoints[0].agent
    pair.gate.on_notification = lambda agent, word: [word] if agent == first else late.append((agent, word)) or []
    a = hold_a(pair, rng)
    pair.leave(a)
    wait_is_needed(pair, 1 + rng.randrange(4))
    pair.gate.open()
    pair.run_until(lambda: bool(late))
    pair.settle()
    wait_is_needed(pair, 1 + rng.randrange(4))
    pair.gate.on_notification = lambda agent, word: [word]
    for agent, word in late:
        pair.prefill.transport.notify(agent, word)
    pair.run_until(lambda: not pair.decode.worker.landings.num_held)
    return a


VARIANTS = [ack_arrives, ack_lost, prefill_killed_while_held, abort_by_decode_timeout, two_decode_ranks_abort]


def late_writes(variant, rounds, colocated, seed=0):
    rng = random.Random(f"{variant.__name__} {seed}")
    pair = make_pair(decode_ranks=2 if variant is two_decode_ranks_abort else 1)
    for _ in range(rounds):
        pair.decode.poison()
        pair.asked.clear()
        a = variant(pair, rng)
        assert a.decoded == []
        assert pair.decode.is_all_free()
        finish_b(pair, colocated)
        pair.run_until(lambda: pair.prefill.worker.is_idle)
        assert pair.is_all_free()
        pair.decode.logits.clear()
        pair.prefill.logits.clear()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.__name__)
def test_pd_01_late_write_never_lands_in_blocks_of_another(variant, colocated):
    late_writes(variant, 3, colocated)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.__name__)
def test_pd_01_fifty_times_with_random_delays(variant, colocated):
    begun = time.process_time()
    late_writes(variant, 50, colocated, seed=1)
    assert time.process_time() - begun < 60


class Delayed:
    """A transport whose writes can be held before they really begin: a prefill that is slow to write.

    A held write stays so until `release`; those of later begin at once when `is_holding` is False again.
    """

    def __init__(self, inner):
        self.inner, self.is_holding = inner, False
        self.held = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, agent, plan, notification=b""):
        transfer = DelayedTransfer(lambda: self.inner.write(agent, plan, notification), plan)
        if self.is_holding:
            self.held.append(transfer)
        else:
            transfer.inner = transfer.begin()
        return transfer

    def check(self, transfer):
        if transfer in self.held:
            return TransferStatus.PENDING
        if transfer.inner is None:
            try:
                transfer.inner = transfer.begin()
            except TransferError as e:
                transfer.error = str(e)
                return TransferStatus.FAILED
        status = self.inner.check(transfer.inner)
        transfer.error = transfer.inner.error
        return status

    def release(self):
        self.is_holding = False
        self.held.clear()


class DelayedTransfer:
    def __init__(self, begin, plan):
        self.begin, self.inner, self.error = begin, None, ""
        self.num_bytes, self.num_pieces = plan.num_bytes, len(plan.pieces)


def late_writes_over_nixl(rounds, colocated):
    pair, rng = make_pair(transport="nixl", wrap=Delayed), random.Random(3)
    transport = pair.prefill.transport
    for _ in range(rounds):
        pair.decode.poison()
        before = pair.prefill.worker.stats().transfer_pieces
        a = pair.send(f"a{len(pair.requests)}", prompt_of(1, 8 * BLOCK - 20), 3)
        pieces = before + rng.randrange(3, 6) * PIECES_OF_A_BLOCK
        pair.run_until(lambda pieces=pieces: pair.prefill.worker.stats().transfer_pieces >= pieces)
        transport.is_holding = True
        for _ in range(3):
            pair.step()
        assert not pair.leave(a).drained
        wait_is_needed(pair, 1 + rng.randrange(8))
        transport.release()
        pair.run_until(lambda: not pair.decode.worker.landings.num_held)
        assert a.decoded == []
        finish_b(pair, colocated)
        pair.run_until(lambda: pair.prefill.worker.is_idle)
        assert pair.is_all_free()
        pair.decode.logits.clear()
        pair.prefill.logits.clear()
    return pair.link_reply.lane


def test_pd_01_late_writes_over_nixl(colocated):
    late_writes_over_nixl(2, colocated)


def test_pd_01_late_writes_over_tcp():
    """In a process of its own: UCX reads its settings once."""
    script = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('injection', sys.argv[1]);"
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.torch.set_num_threads(1);"
        "print(m.late_writes_over_nixl(2, m.pair_module.Colocated(m.make_pair().prefill.config)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, __file__],
        cwd=HERE.parents[1],
        env={**os.environ, "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("tcp")


# ---------------------------------------------------------------- words that are wrong, lost, late or said twice


def rewrite(pair, change, *, agent=None):
    """Let `change` (a Notification to a list of them) decide what of a "last" is delivered, to one agent or all."""

    def on_notification(to, message):
        word = kv_landing.decode_notification(message)
        if word.kind != "last" or agent not in (None, to):
            return [message]
        return [kv_landing.encode(w) for w in change(word)]

    pair.gate.on_notification = on_notification


def changed(**fields):
    return lambda word: [msgspec.structs.replace(word, **fields)]


def assert_refused(pair, request, colocated, *, is_asked=False):
    """No token of it came out of decode, the router was told, all is free, and the next request is right.

    is_asked: its last word is lost for good, so that decode has to ask the writer before anything is free.
    """
    pair.run_until(lambda: bool(request.errors) and pair.prefill.worker.is_idle)
    pair.leave(request)
    pair.settle()
    if is_asked:
        assert not pair.is_all_free()
        let_time_pass(pair, 700)
        let_time_pass(pair, 703)
    assert request.decoded == []
    assert pair.decode.logits == {}
    assert pair.is_all_free()
    pair.gate.on_notification = lambda agent, word: [word]
    assert_serves(pair, colocated)
    assert pair.is_all_free()


LENGTH = 2 * BLOCK + 50


@pytest.fixture
def pair():
    return make_pair()


def test_words_said_twice_change_nothing(pair, colocated):
    pair.gate.on_notification = lambda agent, word: [word, word]
    a = pair.send("a", prompt_of(1, LENGTH), 4)
    pair.run_until(lambda: a.is_over and pair.prefill.worker.is_idle)
    assert_right(pair, a, colocated)
    b = pair.send("b", prompt_of(2, LENGTH), 2)
    pair.step()
    pair.leave(b)
    pair.settle()
    assert b.decoded == [] and pair.is_all_free()
    assert pair.decode.worker.stats().stale_messages >= 1


def test_word_for_an_earlier_life_starts_nothing(pair, colocated):
    rewrite(pair, lambda word: changed(generation=word.generation - 1)(word))
    a = pair.send("a", prompt_of(1, LENGTH), 4)
    pair.run_until(lambda: a.result is not None and pair.prefill.worker.is_idle)
    pair.settle()
    assert a.outputs == [] and pair.decode.worker.stats().stale_messages == 1
    let_time_pass(pair, 601)
    assert_refused(pair, a, colocated, is_asked=True)


def test_lost_word_starts_nothing_and_its_blocks_come_back_when_the_writer_was_asked(pair, colocated):
    rewrite(pair, lambda word: [])
    a = pair.send("a", prompt_of(1, LENGTH), 4, timeout_s=10.0)
    pair.run_until(lambda: a.result is not None and pair.prefill.worker.is_idle)
    pair.settle()
    assert a.outputs == []
    let_time_pass(pair, 11)
    assert_refused(pair, a, colocated, is_asked=True)


def test_word_of_another_landing_does_not_complete_this_one(colocated):
    """The "last" of a late A names B's landing as if the keys had been mixed up: its counts give it away."""
    pair = make_pair()
    b = pair.reserve("b", prompt_of(2, LENGTH + BLOCK), 3)
    rewrite(pair, changed(key=b.landing.key))
    a = pair.send("a", prompt_of(1, LENGTH), 3)
    pair.run_until(lambda: a.result is not None and bool(b.errors))
    assert b.decoded == a.decoded == [] and "tokens" in b.errors[0]
    let_time_pass(pair, 601)
    pair.leave(b)
    assert_refused(pair, a, colocated, is_asked=True)


GROUPS = ["csa_kv", "csa_index", "hca_kv", "state"]


def edit_manifest(name, edit):
    def change(word):
        assert name in {group.name for group in word.manifest}
        groups = [edit(group) if group.name == name else group for group in word.manifest]
        return [msgspec.structs.replace(word, manifest=tuple(g for g in groups if g is not None))]

    return change


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(
    "edit",
    [
        lambda group: None,
        lambda group: msgspec.structs.replace(group, num_units=group.num_units - 1),
        lambda group: msgspec.structs.replace(group, num_bytes=group.num_bytes - 8),
        lambda group: msgspec.structs.replace(group, name="mystery"),
    ],
    ids=["missing", "one_unit_short", "too_few_bytes", "unknown"],
)
def test_manifest_with_a_wrong_cache_group_starts_nothing(name, edit, pair, colocated):
    rewrite(pair, edit_manifest(name, edit))
    a = pair.send("a", prompt_of(1, LENGTH), 4)
    pair.run_until(lambda: bool(a.errors))
    assert "the landing needs" in a.errors[0]
    assert_refused(pair, a, colocated)


@pytest.mark.parametrize("name", GROUPS)
def test_cache_group_that_is_not_written_fails_the_request(name, pair, colocated, monkeypatch):
    """Whoever plans the push forgets a group: the writer counts what it really wrote, and refuses to say "last"."""
    import engine.transfers as transfers

    plan_push = transfers.plan_push

    def forgetful(*args, **options):
        plan = plan_push(*args, **options)
        return type(plan)(tuple(piece for piece in plan.pieces if piece.pool != name))

    monkeypatch.setattr(transfers, "plan_push", forgetful)
    a = pair.send("a", prompt_of(1, LENGTH), 4)
    pair.run_until(lambda: bool(a.errors) and pair.prefill.worker.is_idle)
    monkeypatch.undo()
    assert_refused(pair, a, colocated)


@pytest.mark.parametrize("pieces", [0, 1, 4, 6, 9])
def test_write_that_fails_midway_ends_the_request(pieces, pair, colocated):
    """Its 3 blocks and the state record are 10 pieces."""
    pair.gate.hold(pieces)
    a = pair.send("a", prompt_of(1, LENGTH), 4)
    pair.run_until(lambda: pair.is_held)
    for _ in range(8):
        pair.step()
    pair.gate.fail("the cable was pulled")
    pair.run_until(lambda: bool(a.errors) and pair.prefill.worker.is_idle)
    pair.gate.open()
    assert any("cable" in e or "gave up" in e for e in a.errors)
    assert_refused(pair, a, colocated)


def test_drained_word_that_can_not_be_sent_goes_over_http(pair, colocated):
    pair.gate.hold(4)
    a = pair.send("a", prompt_of(1, LENGTH), 4)
    pair.run_until(lambda: pair.is_held)
    pair.leave(a)
    pair.prefill.transport.disconnect(pair.decode.endpoints[0].agent)
    pair.gate.open()
    pair.run_until(lambda: bool(pair.prefill.told_over_http))
    pair.settle()
    assert not pair.decode.is_all_free()
    pair.carry_drained()
    assert a.decoded == [] and pair.is_all_free()
    pair.link()
    assert_serves(pair, colocated)


# ---------------------------------------------------------------- two decode ranks


@pytest.fixture
def two_ranks():
    return make_pair(decode_ranks=2)


def test_two_ranks_give_what_one_gives(two_ranks, colocated):
    assert_serves(two_ranks, colocated, length=LENGTH)
    assert two_ranks.is_all_free()


def test_one_rank_that_is_late_is_waited_for(two_ranks, colocated):
    pair, late = two_ranks, []
    rewrite(pair, lambda word: late.append(word) or [], agent=pair.decode.endpoints[1].agent)
    a = pair.send("a", prompt_of(1, LENGTH), 4)
    pair.run_until(lambda: bool(late))
    for _ in range(20):
        pair.step()
    assert a.decoded == [] and not pair.decode.logits
    pair.gate.on_notification = lambda agent, word: [word]
    pair.prefill.transport.notify(pair.decode.endpoints[1].agent, kv_landing.encode(late[0]))
    pair.run_until(lambda: a.is_over)
    assert_right(pair, a, colocated)
    pair.run_until(lambda: pair.prefill.worker.is_idle)
    assert pair.is_all_free()


def test_one_rank_that_says_it_twice_does_not_speak_for_the_other(two_ranks, colocated):
    pair, first = two_ranks, two_ranks.decode.endpoints[0].agent
    rewrite(pair, lambda word: [], agent=pair.decode.endpoints[1].agent)
    inner = pair.gate.on_notification
    pair.gate.on_notification = lambda agent, word: inner(agent, word) * (2 if agent == first else 1)
    a = pair.send("a", prompt_of(1, LENGTH), 4)
    pair.run_until(lambda: a.result is not None and pair.prefill.worker.is_idle)
    pair.settle()
    assert a.outputs == []
    let_time_pass(pair, 601)
    assert_refused(pair, a, colocated, is_asked=True)


def test_one_rank_with_a_missing_group_fails_the_request_of_all(two_ranks, colocated):
    pair = two_ranks
    rewrite(pair, edit_manifest("state", lambda group: None), agent=pair.decode.endpoints[1].agent)
    a = pair.send("a", prompt_of(1, LENGTH), 4)
    pair.run_until(lambda: bool(a.errors))
    assert_refused(pair, a, colocated)


def test_ranks_that_were_told_different_first_tokens_start_nothing(two_ranks, colocated):
    pair = two_ranks
    rewrite(
        pair,
        lambda word: changed(first_token=(word.first_token + 1) % 384)(word),
        agent=pair.decode.endpoints[1].agent,
    )
    a = pair.send("a", prompt_of(1, LENGTH), 4)
    pair.run_until(lambda: bool(a.errors))
    assert "first token" in a.errors[0]
    assert_refused(pair, a, colocated)


# ---------------------------------------------------------------- PD-04: decode restarted

CANARY = 0x5A


def fill(group):
    for runner in group.runners:
        for pool in runner.cache.pools.values():
            pool.fill_(CANARY)


def is_untouched(group):
    pools = [p for runner in group.runners for name, p in runner.cache.pools.items() if name != "scratch"]
    return all(bool((pool == CANARY).all()) for pool in pools)


def test_landing_of_a_restarted_decode_is_refused_and_nothing_is_written(pair, colocated):
    old = pair.reserve("a", prompt_of(1, LENGTH), 4)
    pair.restart_decode(num_blocks=17)
    fill(pair.decode)
    pair.start(old)
    pair.run_until(lambda: bool(old.errors) and pair.prefill.worker.is_idle)
    pair.carry_drained()
    assert "gone" in old.errors[0] or "connected" in old.errors[0]
    assert is_untouched(pair.decode)
    assert pair.is_all_free() and pair.decode.worker.stats().stale_messages >= 1
    assert_serves(pair, colocated)


@pytest.mark.parametrize("pushes", [0, 1, 2])
def test_write_prepared_before_a_restart_and_let_go_after_it_is_not_applied(pushes, colocated):
    pair = make_pair(wrap=Delayed)
    transport = pair.prefill.transport
    a = pair.send("a", prompt_of(1, LENGTH), 4)
    pair.run_until(lambda: pair.prefill.worker.stats().transfer_pieces >= pushes * PIECES_OF_A_BLOCK)
    transport.is_holding = True
    pair.run_until(lambda: bool(transport.held))
    transport.is_holding = False
    dead = pair.restart_decode(num_blocks=17)
    fill(pair.decode)
    transport.release()
    pair.run_until(lambda: bool(a.result) and pair.prefill.worker.is_idle)
    pair.carry_drained()
    pair.settle()
    assert a.decoded == [] and dead.worker.take_outputs() == []
    assert is_untouched(pair.decode)
    assert pair.is_all_free()
    assert_serves(pair, colocated)


def test_old_words_do_not_touch_a_landing_of_the_new_life_with_the_same_key(pair, colocated):
    """Keys begin anew in every life: only the generation tells them apart."""
    old = pair.reserve("a", prompt_of(1, LENGTH), 4).landing
    pair.restart_decode(num_blocks=17)
    pair.gate.hold()
    b = pair.send("b", prompt_of(2, LENGTH), 4)
    assert b.landing.key == old.key
    pair.decode.worker.drained(DrainedNotice(key=old.key, generation=old.generation))
    pair.step()
    assert pair.decode.worker.landings.num_open == 1
    pair.gate.open()
    pair.run_until(lambda: b.is_over and pair.prefill.worker.is_idle)
    assert_right(pair, b, colocated)
    assert pair.is_all_free()


def test_prefill_that_restarts_serves_at_once(pair, colocated):
    assert_serves(pair, colocated, name="before")
    pair.restart_prefill()
    assert_serves(pair, colocated, name="after")
    assert pair.is_all_free()
