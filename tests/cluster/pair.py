"""A prefill and a decode group in one thread: the real workers, runners, Writer and transports; no HTTP, no rings.

Every message between leader and rank goes through its encoding. Nothing here decides anything: it only carries. What a
router or a leader's HTTP side would say is said by `leave`, `ask_writer` and `carry_drained`.
"""

from __future__ import annotations

import collections
import dataclasses
import time

import torch

from decode_worker.worker import DecodeWorker
from engine import plan as messages
from engine.block_allocator import BlockAllocator
from engine.config import EngineConfig
from engine.loop import STEPS_UNDER_WAY
from engine.memory_plan import plan_memory
from engine.model.config import load_config
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.transfers import Transfers
from kv_transfer import landing as kv_landing
from kv_transfer.link_test import LINK_WORD
from kv_transfer.local_transport import LocalRegistry, LocalTransport
from kv_transfer.nixl_transport import NixlTransport
from prefill_worker.worker import PrefillWorker
from router.protocol import (
    AbortRequest,
    DrainedNotice,
    Fingerprints,
    LinkRequest,
    NumaBinding,
    PrefillRequest,
    PrefillResult,
    ReserveRequest,
    SamplingParams,
)


class Neighbourly:
    """A transport on one thread with its peers: they poll whenever it looks after a write, or none would ever end."""

    def __init__(self, inner, poll_peers):
        self._inner, self._poll_peers = inner, poll_peers

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def check(self, transfer):
        self._poll_peers()
        return self._inner.check(transfer)


def sampling_params(max_tokens, **options):
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **options})


class Group:
    """One leader's worker and its ranks, `deliver` moves what they have said to each other."""

    def __init__(self, config, generation, num_ranks=1):
        model = load_config(config.model)
        self.config, self.plan, self.generation = config, plan_memory(config, model), generation
        self.runners = [self._runner(rank) for rank in range(num_ranks)]
        self.runner = self.runners[0]
        self.common = dict(vocab_size=model.vocab_size, eos_token_ids=frozenset(model.eos_token_ids), send=self.send)
        self.under_way = collections.deque()  # plans that were run, each with what came of it
        self.to_rank = collections.deque()
        self.to_leader = collections.deque()
        self.names = {}
        self.logits = {}
        self.num_prompt_tokens = 0
        self.runner.on_logits = self._keep

    def _runner(self, rank):
        runner = ModelRunner(self.config, num_blocks=self.plan.num_blocks, num_slots=self.plan.num_slots, rank=rank)
        runner.load()
        return runner

    def _keep(self, seq, position, row):
        self.logits.setdefault((self.names[seq], position), row.clone())

    def poison(self):
        for runner in self.runners:
            runner.cache.poison()

    def send(self, message):
        self.to_rank.append(messages.encode(message))

    def emit(self, message):
        self.to_leader.append(messages.encode(message))

    def ready(self, endpoints):
        self.worker.on_ready(
            [
                messages.RankReady(
                    rank=endpoint.rank,
                    pid=0,
                    device="cpu",
                    numa=NumaBinding(status="unverified", node=-1, cpus=""),
                    transport="t",
                    endpoint=kv_landing.encode(endpoint),
                    model_fingerprint=self.runner.model_fingerprint,
                )
                for endpoint in endpoints
            ]
        )

    def deliver(self):
        """Run what is due on both sides once; True if anything happened. The ranks are as far ahead as they may be."""
        while len(self.under_way) < STEPS_UNDER_WAY and (plan := self.worker.schedule()) is not None:
            for start in plan.starts:
                self.names[start.seq] = self.worker._scheduler.running[start.seq].request_id
            results = [r.run(messages.decode_leader_message(messages.encode(plan))) for r in self.runners]
            assert all(result == results[0] for result in results), "the ranks disagree"
            self.under_way.append((plan, results[0]))
        moved = bool(self.under_way or self.to_rank or self.to_leader)
        if self.under_way:
            self._commit()
        while self.to_rank:
            self.obey(messages.decode_leader_message(self.to_rank.popleft()))
        self.pump()
        while self.to_leader:
            self.worker.on_rank_message(messages.decode_rank_message(self.to_leader.popleft()))
        return moved

    def _commit(self):
        plan, (tokens, failed, _) = self.under_way.popleft()
        self.worker.commit(plan, messages.StepResult(rank=0, number=plan.number, tokens=tokens, failed=failed))

    def is_all_free(self):
        """Nothing is held, once the steps have ended that sequences at their end were still in."""
        while self.worker._scheduler.num_leaving:
            self._commit()
        stats = self.worker.stats()
        return (stats.free_blocks, stats.free_slots, stats.held_blocks, stats.quarantined_blocks) == (
            self.plan.num_blocks,
            self.plan.num_slots,
            0,
            0,
        )


class PrefillGroup(Group):
    """told_over_http: landings whose drained word could not be sent over the transport.   sources: of the last push."""

    def __init__(self, config, transport, generation=11):
        super().__init__(config, generation)
        self.transport = transport
        self.told_over_http, self.sources = [], {}
        self.worker = PrefillWorker(config, self.plan, say_drained=self.told_over_http.append, **self.common)
        self.transfers = Transfers(
            transport,
            self.runner.cache,
            rank=0,
            num_ranks=1,
            generation=generation,
            timeout_s=60.0,  # of one write: a machine under load must not look like a broken lane
            allow_tcp=True,
            emit=self.emit,
        )
        self.pump = self.transfers.pump
        self.ready([self.transfers.endpoint])

    def obey(self, order):
        if isinstance(order, messages.PushPlan):
            self.sources[order.landing.request_id] = order
        self.transfers.obey(order)


class DecodeGroup(Group):
    """transports: one per rank.   may_ask: whether the writer's leader can be asked; then `ask` is called."""

    def __init__(self, config, transports, generation=12, ask=lambda held: None):
        super().__init__(config, generation, len(transports))
        self.transports = transports
        self.endpoints = [
            transport.register(runner.cache.pool_addresses(), generation=generation, rank=rank)
            for rank, (transport, runner) in enumerate(zip(transports, self.runners, strict=True))
        ]
        self.worker = DecodeWorker(
            config, self.plan, generation=generation, leader_url="http://decode", ask_writer=ask, **self.common
        )
        self.ready(self.endpoints)

    def obey(self, message):
        assert isinstance(message, messages.PumpHint)

    def pump(self):
        for rank, transport in enumerate(self.transports):
            for agent, notification in transport.poll():
                if notification != LINK_WORD:
                    self.emit(messages.Arrived(rank=rank, agent=agent, notification=notification))


@dataclasses.dataclass(eq=False)
class Request:
    """What a client sees of one request. result: prefill's answer, a PrefillResult or an error."""

    name: str
    prompt: list[int]
    params: SamplingParams
    landing: kv_landing.Landing
    result: object = None
    outputs: list = dataclasses.field(default_factory=list)

    @property
    def tokens(self):
        first = [self.result.token_id] if isinstance(self.result, PrefillResult) else []
        return [*first, *(t for o in self.outputs for t in o.token_ids)]

    @property
    def decoded(self):
        """Tokens that decode has made out of the cache it was sent."""
        return [t for o in self.outputs for t in o.token_ids]

    @property
    def errors(self):
        """Every error of prefill and decode, in words."""
        prefill = [] if self.result is None or isinstance(self.result, PrefillResult) else [str(self.result)]
        return prefill + [o.error.message for o in self.outputs if o.error is not None]

    @property
    def is_finished(self):
        """Ended as it should."""
        return bool(self.outputs) and self.outputs[-1].finish_reason in ("stop", "length")

    @property
    def is_over(self):
        return self.is_finished or bool(self.errors)


class Pair:
    """`generate` takes a request all the way; pools are poisoned before each, and must be all free after.

    `send`, `step`, `leave` are for tests that stand in between. decode_ranks: fake ranks, each with pools of its own.
    """

    def __init__(
        self,
        folder,
        *,
        transport="local",
        chunk=64,
        decode_ranks=1,
        prefill_blocks=24,
        decode_blocks=32,
        wrap=lambda transport: transport,
        **options,
    ):
        self.registry = registry = LocalRegistry()
        make = {
            "local": lambda name: LocalTransport(name, registry),
            "nixl": lambda name: Neighbourly(NixlTransport(name), lambda: self.decode.pump()),
        }[transport]
        common = {
            "model": str(folder),
            "dtype": "float32",
            "kv_cache_dtype": "fp32",
            "kv_cache_memory_gib": 0.25,
            "max_num_seqs": 4,
            **options,
        }
        # Different pools, so that block ids and slots differ on the two sides.
        prefill = EngineConfig(
            role="prefill", max_num_batched_tokens=chunk, num_blocks=prefill_blocks, **{**common, "max_model_len": 0}
        )
        decode = EngineConfig(role="decode", num_blocks=decode_blocks, ranks=decode_ranks, **common)
        self._make_prefill = lambda generation: PrefillGroup(prefill, wrap(make("prefill")), generation)
        self._make_decode = lambda generation, **changes: DecodeGroup(
            EngineConfig(**{**{f: getattr(decode, f) for f in decode.__struct_fields__}, **changes}),
            [make("decode") for _ in range(decode_ranks)],
            generation,
            self._ask,
        )
        self.requests = {}
        self.may_ask = True
        self.asked = []
        self.prefill, self.decode = self._make_prefill(11), self._make_decode(12)
        self.link()

    @property
    def gate(self):
        """What stands between the writes of prefill and their bytes (local transport)."""
        return self.prefill.transport.gate

    @property
    def is_held(self):
        """A write has begun and stands at the gate."""
        return self.gate._budget == 0 and bool(self.registry.in_flight)

    def restart_prefill(self):
        """As after SIGKILL: nothing of the old group runs any more; the new one knows nothing of it."""
        self.prefill.transport.close()
        self.registry.in_flight.clear()
        old, self.prefill = self.prefill, self._make_prefill(self.prefill.generation + 100)
        self.link()
        return old

    def restart_decode(self, **changes):
        """The same for decode. `changes`: of its configuration."""
        for transport in self.decode.transports:
            transport.close()
        old, self.decode = self.decode, self._make_decode(self.decode.generation + 100, **changes)
        self.link()
        return old

    def link(self):
        replies = []
        fingerprint = Fingerprints(model="m", layout=self.decode.plan.layout.fingerprint())
        self.prefill.worker.links.link(
            LinkRequest(
                worker_id="decode",
                generation=self.decode.generation,
                url="",
                fingerprints=fingerprint,
                endpoints=[kv_landing.encode(endpoint) for endpoint in self.decode.endpoints],
            ),
            replies.append,
        )
        self.run_until(lambda: bool(replies))
        self.link_reply = replies[0]

    def step(self):
        """Let both groups do once what is due; True if anything happened."""
        moved = self.prefill.deliver() | self.decode.deliver()
        for output in self.decode.worker.take_outputs():
            self.requests[output.request_id].outputs.append(output)
        return moved

    def run_until(self, is_done, *, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while not is_done():
            moved = self.step()
            assert time.monotonic() < deadline, "nothing came of it"
            if not moved:
                time.sleep(0.0002)

    def settle(self):
        """Run until nothing moves any more by itself."""
        quiet = 0
        while quiet < 3:
            quiet = 0 if self.step() else quiet + 1

    def reserve(self, name, prompt, max_tokens, *, timeout_s=600.0, **sampling):
        """Take a landing at decode, or raise NoCapacity."""
        prompt, params = list(map(int, prompt)), sampling_params(max_tokens, **sampling)
        landing = self.decode.worker.reserve(
            ReserveRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling=params,
                timeout_s=timeout_s,
                writer_generation=self.prefill.generation,
                writer_url="http://prefill",
            )
        )
        self.requests[name] = Request(name, prompt, params, landing)
        return self.requests[name]

    def start(self, request):
        """Give a reserved request to prefill."""
        self.prefill.worker.accept(
            PrefillRequest(
                request_id=request.name,
                prompt_token_ids=request.prompt,
                sampling=request.params,
                landing=kv_landing.encode(request.landing),
            ),
            lambda result: setattr(request, "result", result),
        )
        return request

    def send(self, name, prompt, max_tokens, **options):
        return self.start(self.reserve(name, prompt, max_tokens, **options))

    def leave(self, request):
        """Say what a router says when a client has gone: prefill first, then decode with prefill's word."""
        landing = kv_landing.encode(request.landing)
        reply = self.prefill.worker.abort(AbortRequest(request_id=request.name, landing=landing))
        self.decode.worker.abort(AbortRequest(request_id=request.name, drained=reply.drained))
        return reply

    def carry_drained(self):
        """Carry over HTTP what no notification could say."""
        for landing in self.prefill.told_over_http:
            self.decode.worker.drained(DrainedNotice(key=landing.key, generation=landing.generation))
        self.prefill.told_over_http.clear()

    def _ask(self, held):
        """Ask the writer's leader, as decode's leader does."""
        self.asked.append(held.landing.key)
        if self.may_ask:
            landing = held.landing
            request = AbortRequest(request_id=landing.request_id, landing=kv_landing.encode(landing))
            if self.prefill.worker.abort(request).drained:
                self.decode.worker.drained(DrainedNotice(key=landing.key, generation=landing.generation))

    def logits_of(self, request):
        """Return [tokens, V]: the first row of prefill, the others of decode."""
        length = len(request.prompt)
        first = self.prefill.logits[request.name, length - 1]
        later = [self.decode.logits[request.name, length + i] for i in range(len(request.decoded))]
        return torch.stack([first, *later])

    def generate(self, prompt, max_tokens, *, poison=True, **sampling):
        """Return (tokens, logits [max_tokens, V])."""
        if poison:
            self.prefill.poison()
            self.decode.poison()
        request = self.send(f"r{len(self.requests) + 1}", prompt, max_tokens, **sampling)
        self.run_until(
            lambda: (
                (request.is_over or (max_tokens == 1 and request.result is not None)) and self.prefill.worker.is_idle
            )
        )
        assert request.errors == []
        assert [o.index for o in request.outputs] == list(range(1, max_tokens))
        return request.tokens, self.logits_of(request)

    def is_all_free(self):
        return self.prefill.is_all_free() and self.decode.is_all_free()


class Colocated:
    """The same weights served by one runner alone, one request at a time, without any transfer: the reference."""

    def __init__(self, config):
        self._config, self._plan = config, plan_memory(config, load_config(config.model))
        self._runner = ModelRunner(config, num_blocks=self._plan.num_blocks, num_slots=self._plan.num_slots)
        self._runner.load()
        self._number = 0
        self._known = {}

    def generate(self, prompt, count, **sampling):
        """Return (tokens, logits [count, V])."""
        key = (tuple(prompt), count, repr(sorted(sampling.items())))
        if key not in self._known:
            self._known[key] = self._generate(list(map(int, prompt)), count, sampling)
        return self._known[key]

    def _generate(self, prompt, count, sampling):
        config, layout = self._config, self._plan.layout
        blocks, logits, tokens = BlockAllocator(self._plan.num_blocks), [], []
        scheduler = Scheduler(
            blocks,
            block_tokens=config.block_size,
            max_num_seqs=1,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self._plan.max_model_len,
            eos_token_ids=frozenset(),
        )
        self._runner.cache.poison()
        self._runner.on_logits = lambda seq, position, row: logits.append(row.clone())
        self._number += 1
        later = layout.num_blocks_for(len(prompt) + count) - layout.num_blocks_for(len(prompt))
        scheduler.add(
            Sequence(
                request_id="c",
                seq=self._number,
                token_ids=list(prompt),
                num_given=len(prompt),
                num_outputs=0,
                sampling=sampling_params(count, **sampling),
                block_ids=blocks.admit(layout.num_blocks_for(len(prompt)), later=later),
                slot=0,
                promised=later,
            )
        )
        while (plan := scheduler.schedule()) is not None:
            sampled, failed, _ = self._runner.run(plan)
            assert not failed
            tokens += [token for _, token in sampled]
            scheduler.commit(plan, messages.StepResult(rank=0, number=plan.number, tokens=sampled))
        return tokens, torch.stack(logits)


def distance(a, b):
    """Return max |a - b|; infinite if anything is NaN or a shape differs."""
    if a.shape != b.shape:
        return float("inf")
    gap = (a - b).abs()
    return float(gap.max()) if bool(gap.isfinite().all()) else float("inf")
