"""DecodeWorker: hands out landings, takes sequences in as their cache arrives, decodes them in one batch.

Lives on the engine loop's thread. Whatever happens to a request after its landing was handed out is told to the
router over the event stream: tokens, how it ended, or an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from decode_worker.landings import Held, Landed, LandingFailed, LandingTable
from engine import errors
from engine.block_allocator import BlockAllocator, SlotAllocator
from engine.config import EngineConfig
from engine.memory_plan import MemoryPlan
from engine.plan import CACHE_CORRUPT, Arrived, LeaderMessage, PumpHint, RankMessage, RankReady, StepPlan, StepResult
from engine.scheduler import Progress, Scheduler
from engine.seams import Seams
from engine.sequence import Sequence
from kv_transfer.landing import Landing, decode_endpoint, decode_notification
from kv_transfer.locality import host_id
from router.protocol import (
    AbortReply,
    AbortRequest,
    DrainedNotice,
    ErrorBody,
    ReserveRequest,
    SequenceOutput,
    WorkerStats,
    WriterLost,
)

log = logging.getLogger(__name__)


class DecodeWorker:
    def __init__(
        self,
        config: EngineConfig,
        plan: MemoryPlan,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        generation: int,
        leader_url: str,
        send: Callable[[LeaderMessage], None],
        ask_writer: Callable[[Held], None] = lambda held: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """send: to every rank.   ask_writer: ask prefill's leader whether a landing is drained, and call `drained`."""
        self._config, self._plan, self._vocab_size = config, plan, vocab_size
        self._send, self._ask_writer, self._clock = send, ask_writer, clock
        self.seams = Seams()
        self._blocks = BlockAllocator(plan.num_blocks)
        self._slots = SlotAllocator(plan.num_slots)
        self.landings = LandingTable(
            plan.layout,
            blocks=self._blocks,
            slots=self._slots,
            generation=generation,
            max_model_len=plan.max_model_len,
            leader_url=leader_url,
            on_blocks=lambda request_id: self.seams.at("reserve", request_id, lambda: None, fail=_no_memory),
        )
        self._scheduler = Scheduler(
            self._blocks,
            block_tokens=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_seqs,
            max_model_len=plan.max_model_len,
            eos_token_ids=eos_token_ids,
            steps_ahead=1,
            # Where a test holds or strikes a sequence, or the step that it runs in, nothing further must be under way.
            keeps_step=lambda sequence: self.seams.is_armed("decode_step", sequence.request_id),
        )
        self._sequences: dict[str, Sequence] = {}
        self._outputs: list[SequenceOutput] = []
        self._next_seq = 1
        self._pump_hint = 0
        self._num_steps = self._num_output_tokens = self._num_corrupt = self._num_handovers = self._num_timed = 0
        self._arrival_seconds = 0.0

    # ------------------------------------------------------------ commands

    def reserve(self, request: ReserveRequest) -> Landing:
        """Return a landing, or raise InvalidRequest or NoCapacity."""
        tokens, limit = request.prompt_token_ids, self._plan.max_model_len
        if request.sampling.forced_token_ids and not self._config.test_seams:
            raise errors.InvalidRequest("forced_token_ids: test seams are closed here (test_seams)")
        if not 1 <= len(tokens) < limit:
            raise errors.InvalidRequest(f"prompt_token_ids: {len(tokens)} tokens; must be 1 to {limit - 1}")
        if not all(0 <= t < self._vocab_size for t in tokens):
            raise errors.InvalidRequest(f"prompt_token_ids: ids must be 0 to {self._vocab_size - 1}")
        if not all(0 <= t < self._vocab_size for t in request.sampling.logit_bias):
            raise errors.InvalidRequest(f"logit_bias: ids must be 0 to {self._vocab_size - 1}")
        if request.request_id in self._sequences:
            raise errors.InvalidRequest(f"request_id {request.request_id!r} is running here")
        landing = self.landings.reserve(request, self._clock())
        self._hint_pump()
        return landing

    def abort(self, request: AbortRequest) -> AbortReply:
        """End a request wherever it is; see AbortRequest."""
        if self.landings.abort(request.request_id, drained=request.drained):
            return AbortReply(known=True, drained=request.drained)
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is None:
            return AbortReply(known=False, drained=True)
        if self._scheduler.abort(sequence):
            self._release(sequence)
        return AbortReply(known=True, drained=True)

    def drained(self, notice: DrainedNotice) -> None:
        self._on_outcome(self.landings.on_drained(notice.key, notice.generation))

    def writer_lost(self, lost: WriterLost) -> None:
        for failure in self.landings.writer_lost(lost.generation, self._clock()):
            self._on_outcome(failure)

    # ------------------------------------------------------------ the loop's side

    def on_ready(self, ranks: list[RankReady]) -> None:
        """Learn the agents that every landing names."""
        self.seams.rank_pid = ranks[0].pid
        self.landings.agents = tuple(decode_endpoint(rank.endpoint).agent for rank in ranks)

    def schedule(self) -> StepPlan | None:
        plan = self._scheduler.schedule()
        if plan is None:
            return None
        self._num_steps += bool(plan.steps)
        return self.seams.of_step(plan)

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        for progress in self._scheduler.commit(plan, result):
            self._advance(progress)

    def on_rank_message(self, message: RankMessage) -> None:
        assert isinstance(message, Arrived), f"a decode rank sent {type(message).__name__}"
        try:
            word = decode_notification(message.notification)
        except msgspec.MsgspecError as e:
            log.warning("rank %d got a notification from %s that is none of ours: %s", message.rank, message.agent, e)
            self.landings.num_stale += 1
            return
        outcome = self.landings.on_notification(message.rank, word)
        if isinstance(outcome, Landed):
            self._num_handovers += 1
            if word.sent_by and word.sent_by == host_id():
                self._num_timed += 1
                self._arrival_seconds += message.at - word.sent_at
        self._on_outcome(outcome)

    def tick(self, now: float) -> None:
        for failure in self.landings.expire(now):
            self._on_outcome(failure)
        for held in self.landings.to_ask(now):
            self._ask_writer(held)
        self._hint_pump()

    def take_outputs(self) -> list[SequenceOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def abort_all(self, reason: str) -> None:
        for request_id in (*self._sequences, *self.landings.open_requests()):
            self._say_error(request_id, errors.WorkerLost(reason))
            self.abort(AbortRequest(request_id=request_id))

    def router_lost(self, router: str) -> None:
        running = [request_id for request_id, sequence in self._sequences.items() if sequence.router == router]
        for request_id in (*running, *self.landings.open_requests(router=router)):
            self._say_error(request_id, errors.WorkerLost("the router did not read this worker's stream any more"))
            self.abort(AbortRequest(request_id=request_id))

    @property
    def is_idle(self) -> bool:
        return not self._sequences and not self._scheduler.num_leaving and not self.landings.num_held

    def stats(self) -> WorkerStats:
        return WorkerStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            free_blocks=self._blocks.available,
            free_slots=self._slots.num_free,
            held_blocks=self._blocks.num_blocks - self._blocks.num_free,
            quarantined_blocks=self.landings.quarantined_blocks,
            open_landings=self.landings.num_open,
            num_steps=self._num_steps,
            steps_without_memory=self._scheduler.num_delays,
            wasted_steps=self._scheduler.num_wasted,
            output_tokens=self._num_output_tokens,
            arrival_seconds=self._arrival_seconds,
            timed_arrivals=self._num_timed,
            handovers=self._num_handovers,
            transfer_failures=self.landings.num_failures,
            checksum_failures=self._num_corrupt,
            stale_messages=self.landings.num_stale,
        )

    # ------------------------------------------------------------ inner

    def _on_outcome(self, outcome: Landed | LandingFailed | None) -> None:
        if isinstance(outcome, Landed):
            self._take_in(outcome)
        elif outcome is not None:
            kind = errors.DeadlineExceeded if outcome.is_deadline else errors.TransferFailed
            self._say_error(outcome.request_id, kind(outcome.reason))
        self._hint_pump()

    def _take_in(self, landed: Landed) -> None:
        held, request = landed.held, landed.held.request
        sequence = Sequence(
            request_id=request.request_id,
            seq=self._next_seq,
            token_ids=[*request.prompt_token_ids, held.first_token],
            num_given=len(request.prompt_token_ids),
            num_outputs=request.num_prior_outputs + 1,
            sampling=request.sampling,
            block_ids=list(held.landing.block_ids),
            slot=held.landing.slot,
            promised=held.promised,
            num_computed=len(request.prompt_token_ids),
            router=request.router,
            checksums=[held.checksums[rank] for rank in sorted(held.checksums)] if any(held.checksums.values()) else [],
        )
        self._next_seq += 1
        self._sequences[request.request_id] = sequence
        self.seams.at("kv_notified_before_first_token", request.request_id, lambda: self._join(sequence))

    def _join(self, sequence: Sequence) -> None:
        if self._sequences.get(sequence.request_id) is sequence:
            self._scheduler.add(sequence)

    def _advance(self, progress: Progress) -> None:
        sequence = progress.sequence
        if progress.is_out:
            self._release(sequence)
        if progress.token_id is None and not progress.error:
            assert progress.is_out, "a decode step always reaches its sequence's last token"
            return
        if progress.error:
            self._num_corrupt += CACHE_CORRUPT in progress.error
            self._say_error(sequence.request_id, errors.of_step("decode", progress.error))
        else:
            assert progress.token_id is not None
            self._num_output_tokens += 1
            self._outputs.append(
                SequenceOutput(
                    request_id=sequence.request_id,
                    index=len(sequence.token_ids) - 1 - sequence.num_given,
                    token_ids=[progress.token_id],
                    logprobs=[] if progress.logprobs is None else [progress.logprobs],
                    finish_reason=progress.finish_reason,
                )
            )
        if progress.error or progress.finish_reason:
            del self._sequences[sequence.request_id]
            return
        if self._scheduler.is_under_way(sequence):
            return  # it went on, so nothing was armed then: a fault armed since meets it after the next token
        self._scheduler.park(sequence)
        self.seams.at(
            "decode_step",
            sequence.request_id,
            lambda: self._scheduler.unpark(sequence),
            n=len(sequence.token_ids) - 1 - sequence.num_given,
            fail=lambda reason: self._fail(sequence, reason),
        )

    def _fail(self, sequence: Sequence, reason: str) -> None:
        self._say_error(sequence.request_id, errors.RequestError(f"decode failed: {reason}"))
        self.abort(AbortRequest(request_id=sequence.request_id))

    def _release(self, sequence: Sequence) -> None:
        self._blocks.release(sequence.block_ids, unused_promise=sequence.promised)
        self._slots.release(sequence.slot)

    def _say_error(self, request_id: str, error: errors.RequestError) -> None:
        body: ErrorBody = error.body()
        self._outputs.append(SequenceOutput(request_id=request_id, index=-1, finish_reason="error", error=body))

    def _hint_pump(self) -> None:
        """Tell the ranks how many landings are held: they look for notifications often while there are any."""
        if self.landings.num_held != self._pump_hint:
            self._pump_hint = self.landings.num_held
            self._send(PumpHint(open_landings=self._pump_hint))


def _no_memory(reason: str) -> None:
    raise MemoryError(reason)
