"""PrefillWorker: takes prompts, computes them in chunks, pushes their cache, answers with the first token.

Lives on the engine loop's thread. A request's answer (first token or error) goes out once; its blocks and slot go back
when the computation is over and every rank has said that nothing of it is being written any more.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable

import msgspec

from engine import errors
from engine.block_allocator import BlockAllocator, SlotAllocator
from engine.config import EngineConfig
from engine.memory_plan import MemoryPlan
from engine.plan import (
    NO_MEMORY,
    LeaderMessage,
    PeerLinked,
    PushDone,
    PushPlan,
    RankMessage,
    RankReady,
    StepPlan,
    StepResult,
)
from engine.scheduler import Progress, Scheduler
from engine.seams import Point, Seams
from engine.sequence import Sequence
from kv_transfer.landing import Landing, decode_landing
from prefill_worker.links import LinkTable
from prefill_worker.pushes import Push, PushTable
from router.protocol import (
    AbortReply,
    AbortRequest,
    FinishReason,
    PrefillBranch,
    PrefillRequest,
    PrefillResult,
    SequenceOutput,
    WorkerStats,
)

log = logging.getLogger(__name__)

_ABORTED_KEPT = 4096

PrefillCallback = Callable[[PrefillResult | errors.RequestError], None]


@dataclasses.dataclass(slots=True, eq=False)
class _Answer:
    """One answer that begins with a prompt: its first token, and the way of the cache into its landing."""

    sequence: Sequence
    push: Push | None
    num_pushes: int = 0
    unsent: list[PushPlan] = dataclasses.field(default_factory=list)
    is_aborted: bool = False

    @property
    def request_id(self) -> str:
        return self.sequence.request_id


@dataclasses.dataclass(slots=True, eq=False)
class _Prefill:
    """A prompt under way, whose result is still owed. answers: of the request itself, then of its branches."""

    sequence: Sequence
    answers: list[_Answer]
    on_result: PrefillCallback
    accepted_at: float
    deadline: float
    started_at: float | None = None
    num_chunks: int = 0


class PrefillWorker:
    def __init__(
        self,
        config: EngineConfig,
        plan: MemoryPlan,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        send: Callable[[LeaderMessage], None],
        say_drained: Callable[[Landing], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """send: to every rank.   say_drained: tell decode's leader over HTTP, when no notification gets through."""
        self._config, self._plan, self._vocab_size = config, plan, vocab_size
        self._send, self._say_drained, self._clock = send, say_drained, clock
        self.seams = Seams()
        self._blocks = BlockAllocator(plan.num_blocks)
        self._slots = SlotAllocator(plan.num_slots)
        self._scheduler = Scheduler(
            self._blocks,
            block_tokens=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            eos_token_ids=eos_token_ids,
            # A step here takes many times as long as planning the next, and pushes are ordered when it is committed.
            steps_ahead=0,
        )
        self._pushes = PushTable(num_ranks=config.ranks, block_tokens=config.block_size)
        self._prefills: dict[int, _Prefill] = {}  # by seq
        self._requests: dict[str, tuple[_Prefill, _Answer]] = {}  # of those, the answers that are still wanted
        self._held: set[int] = set()  # seq numbers whose blocks and slot are taken
        self._aborted: collections.OrderedDict[str, None] = collections.OrderedDict()
        self.links = LinkTable(send)
        self._next_seq = 1
        self._num_steps = self._num_prompt_tokens = self._num_output_tokens = 0

    # ------------------------------------------------------------ commands

    def accept(self, request: PrefillRequest, on_result: PrefillCallback) -> None:
        """Take a prompt, or raise InvalidRequest, NoCapacity or Aborted. on_result is called once, later."""
        ids = [request.request_id, *(branch.request_id for branch in request.branches)]
        if all(request_id in self._aborted for request_id in ids):
            raise errors.Aborted(f"request {request.request_id} was aborted before it arrived")
        for n, request_id in enumerate(ids):
            if request_id in self._requests or request_id in ids[:n]:
                raise errors.InvalidRequest(f"request_id {request_id!r} is here already")
        self._check(request)
        landings = [self._landing(request, landing) for landing in (request.landing, *_landings(request.branches))]
        num_tokens = len(request.prompt_token_ids)
        self._require_room(num_tokens)
        now = self._clock()
        block_ids = self._blocks.admit(self._plan.layout.num_blocks_for(num_tokens))
        try:
            slot = self._slots.take()
        except errors.NoCapacity:
            self._blocks.release(block_ids)
            raise
        seeds = [request.sampling.seed, *(branch.seed for branch in request.branches)]
        sequences = [
            Sequence(
                request_id=request_id,
                seq=self._next_seq + n,
                token_ids=list(request.prompt_token_ids),
                num_given=num_tokens,
                num_outputs=request.num_prior_outputs,
                sampling=msgspec.structs.replace(request.sampling, seed=seed) if n else request.sampling,
                block_ids=block_ids,
                slot=slot,
            )
            for n, (request_id, seed) in enumerate(zip(ids, seeds, strict=True))
        ]
        sequence = sequences[0]
        sequence.branches = sequences[1:]
        self._next_seq += len(sequences)
        self._held.add(sequence.seq)
        checksum = request.checksum or self._config.kv_checksum
        answers = [
            _Answer(
                s, None if landing is None else self._pushes.open(sequence, landing, s.request_id, checksum=checksum)
            )
            for s, landing in zip(sequences, landings, strict=True)
        ]
        prefill = _Prefill(sequence, answers, on_result, now, now + request.timeout_s)
        self._prefills[sequence.seq] = prefill
        self._requests |= {answer.request_id: (prefill, answer) for answer in answers}
        for answer in answers:
            if answer.request_id in self._aborted:  # before it arrived
                self._abort(prefill, answer)
        self._at("prefill_queued", prefill, lambda: self._scheduler.add(sequence))

    def abort(self, request: AbortRequest) -> AbortReply:
        """End a request; see AbortRequest. The landing's drained word follows if writes may be under way."""
        self._aborted[request.request_id] = None
        while len(self._aborted) > _ABORTED_KEPT:
            self._aborted.popitem(last=False)
        found = self._requests.get(request.request_id)
        if found is None:
            return AbortReply(known=False, drained=not self._is_writing(request))
        prefill, answer = found
        drained = answer.push is None or not answer.push.has_started
        self._abort(prefill, answer)
        return AbortReply(known=True, drained=drained)

    # ------------------------------------------------------------ the loop's side

    def on_ready(self, ranks: list[RankReady]) -> None:
        self.seams.rank_pid = ranks[0].pid

    def schedule(self) -> StepPlan | None:
        plan = self._scheduler.schedule()
        if plan is None:
            return None
        self._num_steps += bool(plan.steps)
        for start in plan.starts:
            sequence = self._scheduler.running[start.seq]
            self._prefills[sequence.seq].started_at = self._clock()
        return self.seams.of_step(plan)

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        untouched = {seq for seq, reason in result.failed if reason == NO_MEMORY}
        self._num_prompt_tokens += sum(len(step.token_ids) for step in plan.steps if step.seq not in untouched)
        for progress in self._scheduler.commit(plan, result):
            self._advance(progress)

    def on_rank_message(self, message: RankMessage) -> None:
        match message:
            case PushDone():
                if message.status in ("failed", "undelivered"):
                    log.warning("rank %d, landing %d: %s: %s", message.rank, message.key, message.status, message.error)
                push = self._pushes.on_done(message)
                if push is not None:
                    if push.is_undelivered:
                        self._say_drained(push.landing)
                    self._settle(push.sequence)
                elif message.status == "failed":
                    self._on_push_failed(message)
            case PeerLinked():
                self.links.on_linked(message)
            case _:
                raise AssertionError(f"a prefill rank sent {type(message).__name__}")

    def tick(self, now: float) -> None:
        for prefill in list(self._prefills.values()):
            if now >= prefill.deadline:
                seconds = prefill.deadline - prefill.accepted_at
                self._drop(
                    prefill,
                    errors.DeadlineExceeded(
                        f"prefill of {prefill.sequence.num_given} tokens was not done within {seconds:.1f} s "
                        f"({prefill.sequence.num_computed} were computed)"
                    ),
                )

    def take_outputs(self) -> list[SequenceOutput]:
        return []

    def abort_all(self, reason: str) -> None:
        for prefill in list(self._prefills.values()):
            self._drop(prefill, errors.WorkerLost(reason))

    def router_lost(self, router: str) -> None:
        """Nothing to do: a request here ends with the connection that waits for its answer."""

    @property
    def is_idle(self) -> bool:
        return not self._prefills and not len(self._pushes)

    def stats(self) -> WorkerStats:
        totals = self._pushes.totals
        return WorkerStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            queued_tokens=self._scheduler.queued_tokens,
            free_blocks=self._blocks.available,
            free_slots=self._slots.num_free,
            held_blocks=self._blocks.num_blocks - self._blocks.num_free,
            open_landings=len(self._pushes),
            num_steps=self._num_steps,
            steps_without_memory=self._scheduler.num_delays,
            wasted_steps=self._scheduler.num_wasted,
            prompt_tokens=self._num_prompt_tokens,
            output_tokens=self._num_output_tokens,
            transfer_bytes=totals.num_bytes,
            transfer_pieces=totals.num_pieces,
            transfer_seconds=totals.seconds,
            transfer_post_seconds=totals.post_seconds,
            transfer_exposed_seconds=totals.exposed_seconds,
            handovers=totals.handovers,
            transfer_failures=totals.failures,
            transfer_refusals=totals.causes["refused"],
            transfer_timeouts=totals.causes["deadline"],
            transfer_peer_failures=totals.causes["peer"],
        )

    # ------------------------------------------------------------ inner

    def _check(self, request: PrefillRequest) -> None:
        tokens, limit = request.prompt_token_ids, self._plan.max_model_len
        if request.sampling.forced_token_ids and not self._config.test_seams:
            raise errors.InvalidRequest("forced_token_ids: test seams are closed here (test_seams)")
        has_landing = any(landing is not None for landing in (request.landing, *_landings(request.branches)))
        most = limit - 1 if has_landing else limit
        if not 1 <= len(tokens) <= most:
            raise errors.InvalidRequest(f"prompt_token_ids: {len(tokens)} tokens; must be 1 to {most}")
        if not all(0 <= t < self._vocab_size for t in tokens):
            raise errors.InvalidRequest(f"prompt_token_ids: ids must be 0 to {self._vocab_size - 1}")
        if not all(0 <= t < self._vocab_size for t in request.sampling.logit_bias):
            raise errors.InvalidRequest(f"logit_bias: ids must be 0 to {self._vocab_size - 1}")

    def _require_room(self, num_tokens: int) -> None:
        """Raise NoCapacity for what would wait here for long: more than a few, unless they all fit into one chunk."""
        waiting, chunk = self._scheduler.waiting, self._config.max_num_batched_tokens
        num_waiting_tokens = sum(sequence.num_left for sequence in waiting)
        if len(waiting) >= self._config.waiting_ahead and num_waiting_tokens + num_tokens > chunk:
            raise errors.NoCapacity(
                f"{len(waiting)} prompts of {num_waiting_tokens} tokens are waiting here already; ask again later"
            )

    def _landing(self, request: PrefillRequest, data: bytes | None) -> Landing | None:
        """Return the landing in `data`, made for this prompt."""
        if data is None:
            return None
        try:
            landing = decode_landing(data)
        except msgspec.MsgspecError as e:
            raise errors.InvalidRequest(f"landing: {e}") from e
        layout = self._plan.layout
        if landing.layout != layout.fingerprint():
            raise errors.FingerprintMismatch(f"landing has layout {landing.layout}, this worker {layout.fingerprint()}")
        tokens = request.prompt_token_ids
        needed = layout.num_blocks_for(len(tokens))
        if landing.num_tokens != len(tokens) or len(landing.block_ids) != needed:
            raise errors.InvalidRequest(
                f"landing is for {landing.num_tokens} tokens in {len(landing.block_ids)} blocks, the prompt has "
                f"{len(tokens)} tokens and needs {needed}"
            )
        return landing

    def _advance(self, progress: Progress) -> None:
        sequence = progress.sequence
        prefill = self._prefills.get(sequence.seq)
        if prefill is None:  # dropped while the step was under way
            self._settle(sequence)
        elif progress.error:
            self._drop(prefill, errors.of_step("prefill", progress.error))
        elif progress.token_id is None:
            self._push_computed(prefill)
            prefill.num_chunks += 1
            self._scheduler.park(sequence)
            self._at("prefill_mid", prefill, lambda: self._scheduler.unpark(sequence), n=prefill.num_chunks)
        else:
            self._finish(prefill, progress)

    def _push_computed(self, prefill: _Prefill) -> None:
        for answer in prefill.answers:
            plan = self._pushes.computed(answer.push) if answer.push else None
            if plan is not None:
                answer.num_pushes += 1
                self._send_push("kv_mid", answer, plan, n=answer.num_pushes)

    def _send_push(self, point: Point, answer: _Answer, plan: PushPlan, *, n: int = 0) -> None:
        """Send to the ranks, in order: behind a push that a test holds, the later ones wait too."""
        answer.unsent.append(plan)
        if len(answer.unsent) == 1:
            self.seams.at(
                point,
                answer.request_id,
                lambda: self._send_unsent(answer),
                n=n,
                fail=lambda _: self._send_broken(answer),
            )

    def _send_broken(self, answer: _Answer) -> None:
        """Order a write that will raise (a test seam)."""
        answer.unsent = [msgspec.structs.replace(plan, fails=True) for plan in answer.unsent]
        self._send_unsent(answer)

    def _send_unsent(self, answer: _Answer) -> None:
        plans, answer.unsent = answer.unsent, []
        if answer.push is not None and not answer.push.is_cancelled:
            for plan in plans:
                self._send(msgspec.structs.replace(plan, ordered_at=time.monotonic()))

    def _at(self, point: Point, prefill: _Prefill, go_on: Callable[[], None], *, n: int = 0) -> None:
        """Go on, unless a test holds the request here and it is gone by the time it is let go."""

        def still() -> None:
            if self._prefills.get(prefill.sequence.seq) is prefill:
                go_on()

        self.seams.at(point, prefill.sequence.request_id, still, n=n)

    def _finish(self, prefill: _Prefill, progress: Progress) -> None:
        steps = (progress, *progress.branches)
        self._num_output_tokens += len(steps)
        if progress.finish_reason is None:
            self._scheduler.remove(prefill.sequence)
        self._at("prefill_done_untold", prefill, lambda: self._conclude(prefill, steps))

    def _conclude(self, prefill: _Prefill, steps: tuple[Progress, ...]) -> None:
        now = self._clock()
        started = prefill.started_at or now
        results = [_result(answer, step) for answer, step in zip(prefill.answers, steps, strict=True)]
        result = msgspec.structs.replace(
            results[0], queue_s=started - prefill.accepted_at, compute_s=now - started, branches=results[1:]
        )
        self._answer(prefill, result)
        for answer, one in zip(prefill.answers, results, strict=True):
            if answer.push is None or answer.is_aborted:
                continue
            if one.finish_reason is None:
                last = self._pushes.finish(answer.push, one.token_id)
                self._send_push("kv_done_unnotified", answer, last)
            else:
                self._cancel(answer.push)
        self._settle(prefill.sequence)

    def _answer(self, prefill: _Prefill, result: PrefillResult | errors.RequestError) -> None:
        del self._prefills[prefill.sequence.seq]
        for answer in prefill.answers:
            self._requests.pop(answer.request_id, None)
        prefill.on_result(result)

    def _abort(self, prefill: _Prefill, answer: _Answer) -> None:
        """Nobody wants this answer any more; without any other the prompt is not computed further."""
        answer.is_aborted = True
        if all(one.is_aborted for one in prefill.answers):
            self._drop(prefill, errors.Aborted(f"request {prefill.sequence.request_id} was aborted"))
            return
        del self._requests[answer.request_id]
        if answer.push is not None:
            self._cancel(answer.push)

    def _drop(self, prefill: _Prefill, error: errors.RequestError) -> None:
        """Answer with an error and take the sequence out, at once or when its step is committed."""
        self._answer(prefill, error)
        self._scheduler.abort(prefill.sequence)
        for answer in prefill.answers:
            if answer.push is not None:
                self._cancel(answer.push)
        self._settle(prefill.sequence)

    def _cancel(self, push: Push) -> None:
        if push.is_open and not push.is_cancelled:
            cancel = self._pushes.cancel(push)
            if cancel is not None:
                self._send(cancel)

    def _settle(self, sequence: Sequence) -> None:
        """Give blocks and slot back once neither a step nor a write can touch them."""
        if sequence.seq in self._held and not self._scheduler.holds(sequence) and not self._pushes.holds(sequence):
            self._held.remove(sequence.seq)
            self._blocks.release(sequence.block_ids)
            self._slots.release(sequence.slot)

    def _on_push_failed(self, message: PushDone) -> None:
        """A chunk's write failed: the landing can't be completed, so the rest of the prompt is not worth computing."""
        for prefill in list(self._prefills.values()):
            for push in [a.push for a in prefill.answers if a.push is not None and not a.is_aborted]:
                if (push.landing.generation, push.landing.key) == (message.generation, message.key):
                    self._drop(prefill, errors.TransferFailed(f"writing the cache to decode failed: {message.error}"))
                    break

    def _is_writing(self, request: AbortRequest) -> bool:
        """Whether writes of a request that has its answer may be under way; they are cancelled."""
        push = self._pushes.of_request(request.request_id)
        if push is None:
            return False
        self._cancel(push)
        return True


def _landings(branches: list[PrefillBranch]) -> list[bytes | None]:
    return [branch.landing for branch in branches]


def _result(answer: _Answer, step: Progress) -> PrefillResult:
    """Return what is told of one answer."""
    assert step.token_id is not None
    reason: FinishReason | None = step.finish_reason or ("length" if answer.push is None else None)
    if answer.is_aborted:
        reason = "abort"
    return PrefillResult(
        request_id=answer.request_id,
        token_id=step.token_id,
        logprobs=step.logprobs,
        finish_reason=reason,
        handed_over=answer.push is not None and (answer.push.has_started or reason is None),
    )
