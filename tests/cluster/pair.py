"""A prefill and a decode group in one thread: the real workers, runners, Writer and transports; no HTTP, no rings.

Every message between leader and rank goes through its encoding. Nothing here decides anything: it only carries.
"""

from __future__ import annotations

import collections
import time

import torch

from decode_worker.worker import DecodeWorker
from engine import plan as messages
from engine.config import EngineConfig
from engine.memory_plan import plan_memory
from engine.model.config import load_config
from engine.runner import ModelRunner
from engine.transfers import Transfers, TransferThread
from kv_transfer import landing as kv_landing
from kv_transfer.local_transport import LocalRegistry, LocalTransport
from kv_transfer.nixl_transport import NixlTransport
from prefill_worker.worker import PrefillWorker
from router.protocol import (
    Fingerprints,
    LinkReply,
    LinkRequest,
    NumaBinding,
    PrefillRequest,
    ReserveRequest,
    SamplingParams,
)


class Group:
    """One leader's worker and its rank, `deliver` moves what they have said to each other."""

    def __init__(self, config):
        model = load_config(config.model)
        self.config, self.plan = config, plan_memory(config, model)
        self.runner = ModelRunner(config, num_blocks=self.plan.num_blocks, num_slots=self.plan.num_slots)
        self.runner.load()
        self.common = dict(vocab_size=model.vocab_size, eos_token_ids=frozenset(model.eos_token_ids), send=self.send)
        self.to_rank = collections.deque()
        self.to_leader = collections.deque()
        self.logits = {}
        self.runner.on_logits = lambda seq, position, row: self.logits.setdefault(position, row.clone())

    def send(self, message):
        self.to_rank.append(messages.encode(message))

    def emit(self, message):
        self.to_leader.append(messages.encode(message))

    def ready(self, endpoint):
        self.worker.on_ready(
            [
                messages.RankReady(
                    rank=0,
                    pid=0,
                    device="cpu",
                    numa=NumaBinding(status="unverified", node=-1, cpus=""),
                    transport="t",
                    endpoint=kv_landing.encode(endpoint),
                    model_fingerprint=self.runner.model_fingerprint,
                )
            ]
        )

    def deliver(self):
        """Run what is due on both sides once; True if anything happened."""
        plan = self.worker.schedule()
        if plan is not None:
            tokens, failed = self.runner.run(messages.decode_leader_message(messages.encode(plan)))
            self.worker.commit(plan, messages.StepResult(rank=0, number=plan.number, tokens=tokens, failed=failed))
        moved = plan is not None or bool(self.to_rank or self.to_leader)
        while self.to_rank:
            self.obey(messages.decode_leader_message(self.to_rank.popleft()))
        self.pump()
        while self.to_leader:
            self.worker.on_rank_message(messages.decode_rank_message(self.to_leader.popleft()))
        return moved


class PrefillGroup(Group):
    def __init__(self, config, transport):
        super().__init__(config)
        self.told_over_http, self.failures = [], []
        self.worker = PrefillWorker(config, self.plan, say_drained=self.told_over_http.append, **self.common)

        def make():
            return Transfers(
                transport,
                self.runner.cache.pool_addresses(),
                layout=self.plan.layout,
                rank=0,
                num_ranks=1,
                generation=11,
                timeout_s=5.0,
                emit=self.emit,
            )

        if transport.name == "local":  # in this thread, so that gates hold exactly where a test wants
            transfers = make()
            self.obey, self.pump = transfers.obey, transfers.pump
            self.ready(transfers.endpoint)
        else:  # as in a rank: the peer must be able to poll while a write is under way
            thread = TransferThread(make, on_failed=self.failures.append)
            self.ready(thread.start())
            self.obey, self.pump = thread.order, lambda: None


class DecodeGroup(Group):
    def __init__(self, config, transport):
        super().__init__(config)
        self.transport = transport
        self.endpoint = transport.register(self.runner.cache.pool_addresses(), generation=12, rank=0)
        self.worker = DecodeWorker(config, self.plan, generation=12, leader_url="http://decode", **self.common)
        self.ready(self.endpoint)

    def obey(self, message):
        assert isinstance(message, messages.PumpHint)

    def pump(self):
        for agent, notification in self.transport.poll():
            self.emit(messages.Arrived(rank=0, agent=agent, notification=notification))


class Pair:
    """`generate` takes a request all the way; pools are poisoned before each, and must be all free after."""

    def __init__(self, folder, *, transport="local", chunk=64, **options):
        registry = LocalRegistry()
        make = {"local": lambda name: LocalTransport(name, registry), "nixl": NixlTransport}[transport]
        common = {
            "model": str(folder),
            "dtype": "float32",
            "kv_cache_dtype": "fp32",
            "kv_cache_memory_gib": 0.25,
            "max_num_seqs": 4,
            **options,
        }
        # Different pools, so that block ids and slots differ on the two sides.
        self.prefill = PrefillGroup(
            EngineConfig(role="prefill", max_num_batched_tokens=chunk, num_blocks=24, **common), make("prefill")
        )
        self.decode = DecodeGroup(EngineConfig(role="decode", num_blocks=32, **common), make("decode"))
        self._count = 0
        self.link()

    def link(self):
        replies = []
        fingerprint = Fingerprints(model="m", layout=self.decode.plan.layout.fingerprint())
        self.prefill.worker.link(
            LinkRequest(
                worker_id="decode",
                generation=12,
                url="",
                fingerprints=fingerprint,
                endpoints=[kv_landing.encode(self.decode.endpoint)],
            ),
            replies.append,
        )
        self.run_until(lambda: bool(replies))
        self.link_reply = replies[0]
        assert isinstance(self.link_reply, LinkReply), self.link_reply

    def run_until(self, is_done, *, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while not is_done():
            moved = self.prefill.deliver() | self.decode.deliver()
            assert not self.prefill.failures, self.prefill.failures
            assert time.monotonic() < deadline, "nothing came of it"
            if not moved:
                time.sleep(0.0002)

    def generate(self, prompt, max_tokens, *, poison=True, **sampling):
        """Return (tokens, logits [max_tokens, V]): the first of prefill, the others of decode."""
        self._count += 1
        name, prompt = f"r{self._count}", list(map(int, prompt))
        params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
        if poison:
            self.prefill.runner.cache.poison()
            self.decode.runner.cache.poison()
        self.prefill.logits.clear()
        self.decode.logits.clear()
        landing = self.decode.worker.reserve(
            ReserveRequest(request_id=name, prompt_token_ids=prompt, sampling=params, writer_generation=11)
        )
        results, outputs = [], []
        self.prefill.worker.accept(
            PrefillRequest(
                request_id=name, prompt_token_ids=prompt, sampling=params, landing=kv_landing.encode(landing)
            ),
            results.append,
        )

        def is_done():
            outputs.extend(self.decode.worker.take_outputs())
            ended = bool(outputs) and outputs[-1].finish_reason is not None
            return (ended or max_tokens == 1) and bool(results) and self.prefill.worker.is_idle

        self.run_until(is_done)
        assert [o.error for o in outputs] == [None] * len(outputs), outputs
        assert [o.index for o in outputs] == list(range(1, max_tokens))
        tokens = [results[0].token_id, *(t for o in outputs for t in o.token_ids)]
        first = self.prefill.logits[len(prompt) - 1]
        later = [self.decode.logits[len(prompt) + i] for i in range(max_tokens - 1)]
        return tokens, torch.stack([first, *later])

    def is_all_free(self):
        return all(
            (stats.free_blocks, stats.free_slots, stats.held_blocks, stats.quarantined_blocks)
            == (group.plan.num_blocks, group.plan.num_slots, 0, 0)
            for group in (self.prefill, self.decode)
            for stats in [group.worker.stats()]
        )
