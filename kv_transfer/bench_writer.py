"""The writing process of the transfer benchmark: writes, times them, and has the receiver prove that they landed.

A repetition: the receiver erases the target units; the write is posted and followed to its end; the receiver says when
its poll returned the notification and what the units now sum up to, which must be the sum of the source's. Both read
CLOCK_MONOTONIC, one clock for all processes of a host. Repetitions of the kinds alternate, so that whatever else the
machine does hits all alike.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from kv_transfer.bench_layouts import LAYOUTS
from kv_transfer.bench_pools import ONE_PIECE_POOL, PAGE_BYTES, BenchPools, Units
from kv_transfer.bench_receiver import NUM_SLOTS, Collect, Erase, Landed, Setting
from kv_transfer.bench_run import ORDERS, End, Run, Sample, Step, summarise
from kv_transfer.landing import Endpoint, Landing, decode_notification
from kv_transfer.layout import KVLayout
from kv_transfer.plan import Piece, TransferPlan, manifest, plan_push
from kv_transfer.transport import KvTransport, TransferError, TransferStatus
from kv_transfer.warm import warm
from kv_transfer.writer import Writer

_PATIENCE_S = 60.0


class _Corrupt(TransferError):
    """What landed is not what was sent."""


def write(setting: Setting, results: Connection, receiver: Connection) -> None:
    """Measure everything. Sends Step and Run, and at the end End."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    has_started = False
    try:
        bench = Bench.open(setting, receiver)
        has_started = True
        each = setting.repetitions + 1
        for number, tokens in enumerate(setting.lengths):

            def report(done: int, before: int = number * each, tokens: int = tokens) -> None:
                results.send(Step(before + done, each * len(setting.lengths), f"{tokens:,} tokens"))

            for run in bench.measure(tokens, report):
                results.send(run)
        bench.transport.close()
    except TransferError as error:
        results.send(End(str(error), has_started))
    except (EOFError, ConnectionError):
        results.send(End("the receiving process has ended", has_started))
    else:
        results.send(End())


class Bench:
    """A connected pair. Everything measured is done through `whole` and `chunked`."""

    def __init__(
        self, setting: Setting, pools: BenchPools, transport: KvTransport, peer: Endpoint, receiver: Connection
    ) -> None:
        self.transport, self.pools = transport, pools
        self._setting, self._agent, self._receiver = setting, peer.agent, receiver
        self._generation = peer.generation
        self._layout: KVLayout = LAYOUTS[setting.layout]()
        self._random = random.Random(setting.seed)
        self._writer = Writer(transport, layout=self._layout, generation=1, min_deadline_s=_PATIENCE_S)
        self._number = 0

    @classmethod
    def open(cls, setting: Setting, receiver: Connection) -> Bench:
        """Allocate, register, connect and warm. Raises TransferError."""
        pools = setting.pools(0)
        pools.fill_randomly(setting.seed)
        transport = setting.open_transport(0)
        transport.register(pools.addresses, generation=1, rank=0)
        peer = receiver.recv()
        if not isinstance(peer, Endpoint):
            raise TransferError(str(peer))
        transport.connect(peer)
        warm(transport, peer.agent)
        return cls(setting, pools, transport, peer, receiver)

    def measure(self, tokens: int, report: Callable[[int], None] = lambda done: None) -> list[Run]:
        """Return the runs of one prompt length. report: gets the number of repetitions done."""
        chunk = self._setting.chunk_tokens
        num_bytes = self._layout.num_blocks_for(tokens) * self._layout.block_bytes + self._layout.slot_bytes
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self.pools.device).fill_(0)
        kinds: list[tuple[str, int]] = [("one-piece", 0), *((order, 0) for order in ORDERS)]
        if chunk and tokens > chunk:
            kinds += [(order, chunk) for order in ORDERS]
        samples: dict[tuple[str, int], list[Sample]] = {kind: [] for kind in kinds}
        copies: list[float] = []
        gc.collect()
        gc.disable()
        for repetition in range(self._setting.repetitions + 1):
            report(repetition)
            for kind, chunk_tokens in kinds:
                sample = self._sample(kind, tokens, num_bytes, chunk_tokens)
                if repetition:  # the first one pays for what is set up once
                    samples[kind, chunk_tokens].append(sample)
            copies.append(self.pools.copy_seconds(num_bytes, target))
        gc.enable()
        report(self._setting.repetitions + 1)
        one_piece = samples.pop(("one-piece", 0))
        return [
            summarise(
                found,
                one_piece,
                copies[1:],
                transport=self._setting.transport,
                lane=self.transport.lane(self._agent),
                device=self._setting.device,
                tokens=tokens,
                order=order,
                chunk_tokens=chunk_tokens,
                num_bytes=num_bytes,
            )
            for (order, chunk_tokens), found in samples.items()
        ]

    def _sample(self, kind: str, tokens: int, num_bytes: int, chunk_tokens: int) -> Sample:
        self._number += 1
        if kind == "one-piece":
            size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
            units = {ONE_PIECE_POOL: range(size // PAGE_BYTES)}
            return self.whole(TransferPlan((Piece(ONE_PIECE_POOL, 0, 0, size),)), units, units)
        blocks = [self._blocks(kind, self._layout.num_blocks_for(tokens)) for _ in range(2)]
        slots = [self._random.randrange(NUM_SLOTS) for _ in range(2)]
        source, target = (self._units(ids, slot) for ids, slot in zip(blocks, slots, strict=True))
        if chunk_tokens:
            landing = Landing(
                request_id=f"bench-{self._number}",
                key=self._number,
                generation=self._generation,
                num_tokens=tokens,
                block_ids=tuple(blocks[1]),
                slot=slots[1],
                layout=self._layout.fingerprint(),
                agents=(self._agent,),
                leader_url="",
            )
            return self.chunked(landing, blocks[0], slots[0], source, target, chunk_tokens=chunk_tokens)
        plan = plan_push(
            self._layout,
            source_blocks=blocks[0],
            target_blocks=blocks[1],
            first=0,
            last=len(blocks[0]),
            source_slot=slots[0],
            target_slot=slots[1],
        )
        return self.whole(plan, source, target)

    def whole(self, plan: TransferPlan, source: Units, target: Units) -> Sample:
        """Write a plan at once. source, target: the units it reads and those it fills. Raises TransferError."""
        self._erase(target)
        word = f"bench {self._number}".encode()
        started = time.monotonic()
        transfer = self.transport.write(self._agent, plan, word)
        posted = time.monotonic()
        while (status := self.transport.check(transfer)) is TransferStatus.PENDING:
            if time.monotonic() - started > _PATIENCE_S:
                raise TransferError(f"a write of {plan.num_bytes} bytes did not end within {_PATIENCE_S:.0f} s")
            os.sched_yield()  # the receiver may wait for this core
        done = time.monotonic()
        if status is TransferStatus.FAILED:
            raise TransferError(transfer.error)
        landed = self._collect(source, target)
        if landed.message != word:
            raise _Corrupt(f"the receiver was told {landed.message!r}, not {word!r}")
        seen = landed.seen_s - started
        return Sample(len(plan.pieces), posted - started, done - started, seen, seen)

    def chunked(
        self,
        landing: Landing,
        source_blocks: Sequence[int],
        source_slot: int,
        source: Units,
        target: Units,
        *,
        chunk_tokens: int,
    ) -> Sample:
        """Push a landing chunk by chunk through Writer. Raises TransferError."""
        self._erase(target)
        step = chunk_tokens // self._layout.block_tokens
        num_pieces, begun = 0, time.monotonic()
        for first in range(0, len(source_blocks), step):
            last = min(first + step, len(source_blocks))
            is_last = last == len(source_blocks)
            started = time.monotonic()
            plan = plan_push(
                self._layout,
                source_blocks=source_blocks,
                target_blocks=landing.block_ids,
                first=first,
                last=last,
                source_slot=source_slot if is_last else None,
                target_slot=landing.slot if is_last else None,
            )
            self._writer.push(landing, plan, is_last=is_last, first_token=0 if is_last else -1)
            events = self._writer.pump()  # posts it
            posted = time.monotonic()
            while not events:
                os.sched_yield()
                events = self._writer.pump()
            done = time.monotonic()
            if events[0].status != "done":
                raise TransferError(events[0].error)
            num_pieces += len(plan.pieces)
        landed = self._collect(source, target)
        if decode_notification(landed.message).manifest != manifest(self._layout, landing.num_tokens):
            raise _Corrupt(f"the receiver was told {landed.message!r} of landing {landing.key}")
        return Sample(num_pieces, posted - started, done - started, landed.seen_s - started, landed.seen_s - begun)

    def _erase(self, units: Units) -> None:
        self._receiver.send(Erase(units))
        self._answer()

    def _collect(self, source: Units, target: Units) -> Landed:
        """Wait until the receiver has seen the word, and compare what it holds with what was sent."""
        self._receiver.send(Collect(target))
        sent = self.pools.checksums(source)
        landed: Landed = self._answer()
        if wrong := [name for name, checksum in sent.items() if landed.checksums[name] != checksum]:
            raise _Corrupt(f"corrupt: what landed in {', '.join(wrong)} differs from what was sent; trust no figure")
        return landed

    def _answer(self) -> Any:
        if not self._receiver.poll(_PATIENCE_S):
            raise TransferError(f"the receiver did not answer, or saw no notification, for {_PATIENCE_S:.0f} s")
        return self._receiver.recv()

    def _blocks(self, order: str, count: int) -> list[int]:
        """Return neighbours from somewhere in the pool, or blocks drawn from all of it."""
        if order == "fragmented":
            return self._random.sample(range(self._setting.num_blocks), count)
        start = self._random.randrange(self._setting.num_blocks - count + 1)
        return list(range(start, start + count))

    def _units(self, blocks: Sequence[int], slot: int) -> dict[str, Sequence[int]]:
        return {group.name: blocks if group.unit == "block" else (slot,) for group in self._layout.groups}
