"""What pushes of the cache cost the prefill that goes on beside them: `python -m bench.push`.

    python -m bench.push --model DeepSeek-V4-Flash --load-format synthetic --simulate-rank 0/4 --device cuda \\
        --peer-device 1 --prompt 8192 --json push.json
    python -m bench.push --model dsv4-tiny --prompt 512 --chunk-tokens 128 --block-size 128         a dry run on the CPU

One rank in this process computes prompts back to back, as in `bench prefill`. Its chunks are pushed by the thread that
a prefill rank has for it (engine/transfers.py), each while the next chunk is computed, the last one beside the next
prompt; a process on --peer-device receives and hears as a decode rank does. Series of --prompts prompts with pushes and
without take turns, --rounds times.

slowed_share: by how much more time a series took with pushes, median of the rounds; alone_spread says what series
without differ by among themselves. exposed_ms: from the last chunk's order until all was written. What landed of the
last prompts is compared with what was sent. Blocks on both sides are neighbours (merged), or in random order
(fragmented: a piece per block and group). Exit code 1 if a push failed.
"""

from __future__ import annotations

import argparse
import functools
import queue
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.in_process import InProcessEngine
from bench.progress import Progress
from bench.push_peer import Peer, Pools, PushFailed, checksums, memory_of
from bench.report import write_json
from bench.step_flags import add_flags, add_prompt_flags, count, counts
from engine.flags import ConfigError, parse_flags
from engine.plan import ConnectPeer, PeerLinked, PushDone, PushPlan, RankMessage, SequenceStart, SequenceStep, StepPlan
from engine.transfers import Transfers, TransferThread
from kv_transfer.landing import Landing, encode
from kv_transfer.transports import make_transport
from router.protocol import SamplingParams

ORDERS = ("merged", "fragmented")
_PLACES = 2  # prompts whose blocks are held at once: one is computed, one may still be written from
_PATIENCE_S = 60.0


class Place(NamedTuple):
    """Blocks and a slot of a prompt, here and at the receiver."""

    source: list[int]
    target: list[int]
    slot: int


class Pusher:
    """Prompts through an engine, with or without pushes to a peer."""

    def __init__(self, engine: InProcessEngine, peer: Peer, transfers: TransferThread, said: queue.Queue[Any]) -> None:
        self._engine, self._peer, self._transfers, self._said = engine, peer, transfers, said
        self._block_tokens = engine.config.block_size
        self._layout = engine.runner.cache.layout.fingerprint()
        self._number = 0
        self._under_way: dict[int, PushDone | None] = {}  # by key: the word on the last push, once it is there

    def connect(self) -> PeerLinked:
        """Return what was found of the lane. Raises PushFailed."""
        self._transfers.order(ConnectPeer(endpoint=encode(self._peer.endpoint)))
        linked = self._take()
        if not isinstance(linked, PeerLinked) or linked.error:
            raise PushFailed(f"no lane to the receiver: {getattr(linked, 'error', linked)}")
        return linked

    def series(self, prompts: int, tokens: list[int], places: Sequence[Place], *, pushes: bool) -> tuple[float, float]:
        """Run prompts back to back; return the seconds until all are computed, and of exposed transfer, mean."""
        began, exposed = time.perf_counter(), []
        for number in range(prompts):
            place = places[number % _PLACES]
            before = self._number - _PLACES + 1  # whose source these blocks were
            if before in self._under_way:
                exposed.append(self._await(before).exposed_seconds)
            self._prompt(tokens, place, pushes=pushes)
        seconds = time.perf_counter() - began
        exposed += [self._await(key).exposed_seconds for key in sorted(self._under_way)]
        return seconds, statistics.mean(exposed) if exposed else 0.0

    def proves(self, place: Place) -> bool:
        """Whether the receiver holds in a place what is here."""
        here = checksums(self._engine.runner.cache, place.source, place.slot)
        return here == self._peer.checksums(place.target, place.slot)

    def _prompt(self, tokens: list[int], place: Place, *, pushes: bool) -> None:
        self._number += 1
        number, chunk = self._number, self._engine.config.max_num_batched_tokens
        landing = Landing(
            request_id=f"bench-{number}",
            key=number,
            generation=self._peer.endpoint.generation,
            num_tokens=len(tokens),
            block_ids=tuple(place.target),
            slot=place.slot,
            layout=self._layout,
            agents=(self._peer.endpoint.agent,),
            leader_url="",
        )
        order = functools.partial(PushPlan, landing=landing, block_ids=place.source, slot=place.slot)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        begin = [SequenceStart(seq=number, slot=place.slot, block_ids=place.source, sampling=sampling)]
        pushed = 0
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            is_last = start + len(piece) == len(tokens)
            step = SequenceStep(seq=number, start=start, token_ids=piece, new_block_ids=[], sample=is_last)
            outcome = self._engine.runner.run(StepPlan(number=start, starts=begin, steps=[step]))
            begin = []
            if outcome.failed:
                raise PushFailed(f"the chunk of {len(piece)} tokens at {start} failed: {outcome.failed[0][1]}")
            full = len(place.source) if is_last else (start + len(piece)) // self._block_tokens
            if pushes and full > pushed:
                self._transfers.order(
                    order(
                        first=pushed,
                        last=full,
                        is_last=is_last,
                        first_token=outcome.tokens[0][1] if is_last else -1,
                        ordered_at=time.monotonic(),
                    )
                )
                pushed = full
        if pushes:
            self._under_way[number] = None
        self._engine.runner.run(StepPlan(number=0, ends=[number]))

    def _await(self, key: int) -> PushDone:
        """Return the word on the last push of a prompt. Raises PushFailed."""
        while (done := self._under_way[key]) is None:
            said = self._take()
            if not isinstance(said, PushDone) or said.status != "done":
                raise PushFailed(f"a push was not done: {said}")
            if said.is_last:
                self._under_way[said.key] = said
        del self._under_way[key]
        return done

    def _take(self) -> Any:
        try:
            return self._said.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise PushFailed(f"no word of the pushes within {_PATIENCE_S:.0f} s") from None


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return the report. Raises PushFailed, ConfigError, ValueError."""
    longest = max(args.prompt)
    chunk = min(args.chunk_tokens, longest)
    engine = InProcessEngine(args, sequences=_PLACES, longest=longest, chunk_tokens=chunk, say=progress.say)
    cache, config = engine.runner.cache, engine.config
    device = f"cuda:{args.peer_device}" if engine.is_gpu else "cpu"
    peer = Peer(Pools(cache.layout, cache.num_blocks, cache.num_slots, device, args.transport))
    said: queue.Queue[RankMessage | str] = queue.Queue()

    def transfers() -> Transfers:
        here = engine.runner.device
        return Transfers(
            make_transport(args.transport, "push-source", memory=memory_of(here.type), device=here.index or 0),
            cache,
            rank=0,
            num_ranks=1,
            generation=1,
            timeout_s=config.transfer_timeout_s,
            allow_tcp=not engine.is_gpu,
            emit=said.put,
        )

    thread = TransferThread(transfers, on_failed=said.put)
    try:
        thread.start()
        pusher = Pusher(engine, peer, thread, said)
        link = pusher.connect()
        progress.say(f"lane {link.lane}, {link.gb_per_s:.1f} GB/s")
        runs = [
            _run(pusher, engine, tokens, order, args, progress) for tokens in args.prompt for order in ORDERS
        ]  # fmt: skip
        thread.stop()
    finally:
        peer.close()
    lane = {"transport": link.transport, "lane": link.lane, "gb_per_s": link.gb_per_s}
    asked = {"chunk_tokens": chunk, "prompts": args.prompts, "rounds": args.rounds, "peer_device": device}
    return {"conditions": engine.conditions() | asked | {"link": lane}, "runs": runs}


def _run(
    pusher: Pusher, engine: InProcessEngine, tokens: int, order: str, args: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """Return the entry of one length and order."""
    draw = random.Random(0)
    prompt = [draw.randrange(engine.floor.model.vocab_size) for _ in range(tokens)]
    places = _places(engine, tokens, order, draw)
    pusher.series(_PLACES, prompt, places, pushes=True)  # what is set up once
    pushed: list[float] = []
    alone: list[float] = []
    exposed: list[float] = []
    for number in range(args.rounds):
        for pushes in (True, False) if number % 2 else (False, True):  # drifts hit both alike
            seconds, last = pusher.series(args.prompts, prompt, places, pushes=pushes)
            (pushed if pushes else alone).append(seconds)
            exposed += [last] if pushes else []
    pusher.series(_PLACES, prompt, places, pushes=True)  # what lies here now is what was sent
    if not all(pusher.proves(place) for place in places):
        raise PushFailed(f"{tokens} tokens, {order}: what landed differs from what was sent; trust no figure")
    slowed = statistics.median(a / b for a, b in zip(pushed, alone, strict=True)) - 1
    total = args.prompts * tokens
    progress.say(
        f"prompt {tokens:,}, {order}: slowed by {slowed:.2%}, exposed {1000 * statistics.median(exposed):.2f} ms"
    )
    return {
        "prompt": tokens,
        "order": order,
        "tokens_per_s_alone": total / statistics.median(alone),
        "tokens_per_s_pushing": total / statistics.median(pushed),
        "slowed_share": slowed,
        "alone_spread": max(alone) / min(alone) - 1,
        "exposed_ms": 1000 * statistics.median(exposed),
        "seconds_alone": alone,
        "seconds_pushing": pushed,
    }


def _places(engine: InProcessEngine, tokens: int, order: str, draw: random.Random) -> list[Place]:
    """Return places for prompts under way together: their blocks are neighbours, or anywhere."""
    cache = engine.runner.cache
    need = cache.layout.num_blocks_for(tokens)
    sides = [list(range(cache.num_blocks)) for _ in range(2)]
    for side in sides if order == "fragmented" else ():
        draw.shuffle(side)
    parts = [slice(at * need, (at + 1) * need) for at in range(_PLACES)]
    return [Place(sides[0][part], sides[1][part], slot) for slot, part in enumerate(parts)]


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m bench.push") -> int:
    """Measure; return 0 well, 1 if a push or a chunk failed, 2 for wrong usage."""
    parser = _parser(prog)
    try:
        args = parse_flags(parser, argv)
        report = measure(args, Progress())
    except PushFailed as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except (ConfigError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    for run in report["runs"]:
        print(
            f"{run['prompt']:>7,} tokens, {run['order']:<10} {run['tokens_per_s_alone']:,.0f} tokens/s alone, "
            f"{run['tokens_per_s_pushing']:,.0f} pushing: slowed by {run['slowed_share']:.2%} (alone differs by "
            f"{run['alone_spread']:.2%}), exposed {run['exposed_ms']:.2f} ms"
        )
    if args.json:
        write_json(report, args.json)
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("prompts, pushes and report").add_argument
    add("--prompt", type=counts, default=[8192], metavar="L,L,...", help="tokens of the prompts (8192)")
    add_prompt_flags(add)
    add("--prompts", type=count, default=8, metavar="N", help="of a series, back to back (%(default)s)")
    add("--rounds", type=count, default=5, metavar="N", help="of a series with and one without pushes (%(default)s)")
    add("--transport", choices=("nixl", "host", "auto"), default="auto", help="what carries the cache (%(default)s)")
    add("--peer-device", type=int, default=0, metavar="N", help="GPU of the receiver (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="all figures")
    add_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
