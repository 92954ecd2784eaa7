"""Messages between the router and the workers, and the framing of the event stream.

The router is the only client of the workers' request routes, so the client owns the contract. This module
imports msgspec alone; the workers import it, and nothing else of `router`.

Routes of a worker's leader (bodies are msgpack of the structs below unless noted):

    GET  /info                   -> WorkerInfo (JSON, for people too)
    GET  /stream?from=N          -> endless frames, `encode_frame`; N is the first frame number wanted, 0 = from now on
                                    (no frame made after the answer's head was sent may be missing)
    POST /abort    AbortRequest  -> AbortReply
    POST /reserve  ReserveRequest -> ReserveReply            decode only
    POST /drained  DrainedNotice -> Ack                      decode only; from a prefill leader, or the router
    POST /writer_lost WriterLost -> Ack                      decode only; from whoever knows the process to be dead
    POST /prefill  PrefillRequest -> PrefillResult           prefill only; answers with the first token
    POST /link     LinkRequest   -> LinkReply                prefill only; connect to a decode worker and warm the lane
    POST /unlink   WriterLost    -> Ack                      prefill only; forget a decode worker's generation
    POST /drain    (empty)       -> Ack                      accept nothing new, finish what runs

An answer other than 200 carries an ErrorBody. New fields come with defaults; an incompatible change raises
PROTOCOL_VERSION, which both sides compare when a worker is registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeVar

import msgspec

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 << 20

FinishReason = Literal["stop", "length", "abort", "error"]
WorkerRole = Literal["prefill", "decode"]
WorkerState = Literal[
    "starting", "loading", "planning", "capturing", "linking", "warming", "ready", "draining", "stopped", "failed"
]
ErrorCode = Literal[
    "no_capacity",  # nothing wrong: ask again later, or another worker
    "invalid_request",  # the sender is at fault; the same request will fail again
    "not_ready",
    "draining",
    "fingerprint_mismatch",  # model, layout or protocol differ between the two sides
    "stale_generation",  # the message is meant for an earlier life of this worker
    "aborted",
    "deadline",
    "transfer_failed",
    "worker_lost",
    "internal",
]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every wire message: immutable, named fields, defaults left out."""


class Guide(Message, frozen=True, kw_only=True):
    """What the answer's text must match: the mask of the sampler. Compiled by the router before it is sent.

    grammar: in the syntax of the grammar library, which both sides use (router/guided.py writes it).
    after_token_id: output token behind which that text begins, such as `</think>`; -1: the first token is its first.
    """

    grammar: str
    after_token_id: int = -1


class SamplingParams(Message, frozen=True, kw_only=True):
    """How to choose tokens, and when to stop. Validated by the router; carried unchanged to the sampler.

    temperature 0 is greedy. top_k 0 is off. `seed` is always set: the router draws one if the client did not.
    Noise depends on (seed, position) alone, so a resumed request goes on with the same samples.
    num_logprobs: alternatives reported beside each token's log probability; -1: no log probabilities.
    forced_token_ids: a test seam: the first outputs, whatever was sampled; workers refuse it unless seams are open.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int = -1
    guide: Guide | None = None
    forced_token_ids: tuple[int, ...] = ()


class TokenLogprobs(Message, frozen=True, kw_only=True):
    """Log probabilities by the model itself, before bias, penalties, temperature and masks.

    logprob: of the token that was chosen.   top_ids, top_logprobs: the best of the vocabulary, best first.
    """

    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class ErrorBody(Message, frozen=True, kw_only=True):
    """Why a call failed. `message` says what was wanted, what was found and what to change."""

    code: ErrorCode
    message: str
    retry_after_s: float = 0.0


class Ack(Message, frozen=True, kw_only=True):
    """Nothing to say but that it was done."""


# ---------------------------------------------------------------- one request


class ReserveRequest(Message, frozen=True, kw_only=True):
    """Hold a landing at decode: all that decode needs but the first token.

    prompt_token_ids: the prompt and, when a request is resumed, the tokens already emitted; the last
    `num_prior_outputs` of them count as output. timeout_s: how long the landing may stay empty.
    writer_generation: the prefill worker that will write, so that its death frees the landing; 0 if not known.
    writer_url: its leader, who is asked about a landing that nobody tells of any more; "" if not known.
    router: who asks, by the name it reads the event stream under; when no stream is open any more, nobody wants the
    answer, and the request is ended.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    num_prior_outputs: int = 0
    timeout_s: float = 600.0
    writer_generation: int = 0
    writer_url: str = ""
    router: str = ""


class ReserveReply(Message, frozen=True, kw_only=True):
    """`landing` is opaque to the router: it passes it to the prefill worker as it is."""

    landing: bytes


class PrefillBranch(Message, frozen=True, kw_only=True):
    """One more answer to the same prompt: its own first token, seed and landing, and an id to abort it by."""

    request_id: str
    seed: int
    landing: bytes | None = None


class PrefillRequest(Message, frozen=True, kw_only=True):
    """Compute the prompt, sample one token, push the cache into `landing`; the same for every one of `branches`.

    landing None: the answer ends with its first token (max_tokens 1), so there is nothing to push.
    checksum: compare what lands with what was sent, byte for byte, even if the worker is not told to do so always.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    landing: bytes | None = None
    checksum: bool = False
    num_prior_outputs: int = 0
    timeout_s: float = 600.0
    branches: list[PrefillBranch] = []


class PrefillResult(Message, frozen=True, kw_only=True):
    """Output token 0. With a finish_reason the request is over and decode's landing must be released.

    queue_s, compute_s: seconds waiting at this worker, and from first chunk to first token.
    handed_over: bytes of this request's cache went, or will go, into the landing; False means that none ever did
    or will, so the landing may be freed at once.
    logprobs: if asked for.   branches: one for each branch of the request, in its order.
    """

    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    handed_over: bool = True
    queue_s: float = 0.0
    compute_s: float = 0.0
    branches: list[PrefillResult] = []


class AbortRequest(Message, frozen=True, kw_only=True):
    """End a request wherever it is in this worker. Unknown ids are no error.

    At decode, `drained` says that no write into the landing is under way or will ever start.
    At prefill, `landing` lets the worker send its drained word even for a request that it never saw; the id is
    remembered, and a /prefill that arrives late under it is refused.
    """

    request_id: str
    drained: bool = False
    landing: bytes | None = None


class AbortReply(Message, frozen=True, kw_only=True):
    """known: the request was here. drained: no write for it is under way or will ever start."""

    known: bool
    drained: bool


class DrainedNotice(Message, frozen=True, kw_only=True):
    """The writer of landing `key` of decode generation `generation` will not touch it any more."""

    key: int
    generation: int


class WriterLost(Message, frozen=True, kw_only=True):
    """The worker with this generation is known to be dead: whatever it held or wrote is void."""

    generation: int


# ---------------------------------------------------------------- linking


class Fingerprints(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Must be equal on both sides. model: config and tensor table; layout: cache geometry."""

    model: str
    layout: str
    protocol: int = PROTOCOL_VERSION


class LinkRequest(Message, frozen=True, kw_only=True):
    """Connect to every rank of a decode worker and warm each lane with a small write.

    endpoints: one opaque kv_transfer Endpoint per decode rank.
    """

    worker_id: str
    generation: int
    url: str
    fingerprints: Fingerprints
    endpoints: list[bytes]


class LinkReply(Message, frozen=True, kw_only=True):
    """transport: "nixl", "host", ...; lane: what the bytes really travel on ("cma", "tcp", "cuda_ipc", ...).

    Of the slowest rank: warmup_us, the first write; latency_us, a small write; gb_per_s, a large one, beside
    copy_gb_per_s of a local copy.
    staging_pages: pages by NUMA node of the decode ranks' staging memory; {}: the lane has none.
    """

    transport: str
    lane: str
    warmup_us: float = 0.0
    latency_us: float = 0.0
    gb_per_s: float = 0.0
    copy_gb_per_s: float = 0.0
    staging_pages: dict[int, int] = {}


# ---------------------------------------------------------------- what a worker says of itself


class NumaBinding(Message, frozen=True, kw_only=True, omit_defaults=False):
    """status: bound (verified on memory pages), simulated (one node: CPUs split only) or unverified.

    threads: of the process; stray_threads: those that may run on other CPUs than `cpus`.
    pages: of each memory that was looked at (pools, and fresh pages), how many lie on which node.
    warnings: what lies on another node than it should, each with what to do.
    """

    status: Literal["bound", "simulated", "unverified"]
    node: int
    cpus: str
    evidence: str = ""
    threads: int = 0
    stray_threads: int = 0
    pages: dict[str, dict[int, int]] = {}
    warnings: list[str] = []


class ExchangeTiming(Message, frozen=True, kw_only=True, omit_defaults=False):
    """What one exchange of `num_bytes` took when it was measured at start. way: how it went."""

    way: str
    num_bytes: int
    us: float


class ExchangeInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """How a rank exchanges with the others of its group.

    backend: gloo or nccl.   experts: cut by their "inner" dimension, or shared out by "expert".   one_shot_bytes: sums
    up to so many bytes go straight through peers' memory; 0: none do.   one_shot: why none do, or "".   small, large:
    settings of NCCL for sums below and from `large_bytes` on; "" for gloo.   timings: what decided that; of the slowest
    rank.
    """

    backend: str
    experts: str = ""
    one_shot_bytes: int = 0
    one_shot: str = ""
    small: str = ""
    large: str = ""
    large_bytes: int = 0
    timings: list[ExchangeTiming] = []


class RankInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """exchange: None for a rank alone."""

    rank: int
    pid: int
    device: str
    numa: NumaBinding
    exchange: ExchangeInfo | None = None


class Limits(Message, frozen=True, kw_only=True, omit_defaults=False):
    """What this worker can take. max_model_len: prompt and output tokens of one request."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_tokens: int
    num_blocks: int
    vocab_size: int


class MemoryPart(Message, frozen=True, kw_only=True, omit_defaults=False):
    """One thing that a rank's memory goes to. how: the arithmetic, for people.

    planned_bytes: what num_bytes was before it was measured; 0: it was not.
    """

    name: str
    num_bytes: int
    how: str = ""
    planned_bytes: int = 0


class MemorySummary(Message, frozen=True, kw_only=True, omit_defaults=False):
    """What the memory of each rank goes to, and what that allows; measured ones are of the rank with least left.

    device_bytes: all there is; 0: not planned (CPU).   left_bytes: given to nobody.
    cache_tokens: of all sequences together.   context_at_full_batch: tokens of each when max_num_seqs run;
    context_that_fits: the same if the cache took all that is left and max_model_len allowed it.
    longest_context: that one request could have.   largest_batch: of requests of max_model_len tokens each.
    graph_sizes: sequences of each captured decode step, or tokens of each captured chunk of prompts.   graph_nodes: by
    those, once it was captured and replayed.
    """

    device_bytes: int
    parts: list[MemoryPart]
    left_bytes: int
    cache_tokens: int
    max_num_seqs: int
    max_model_len: int
    context_at_full_batch: int
    context_that_fits: int
    longest_context: int
    largest_batch: int
    graph_sizes: list[int] = []
    graph_nodes: dict[int, int] = {}
    is_measured: bool = False


class WorkerStats(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Gauges of this moment. queued_tokens: prompt tokens accepted but not computed yet.

    free_blocks: not held, not quarantined and not promised to a running request's growth.
    steps_without_memory: steps that did not fit into memory, and left out or failed their newest sequences.
    wasted_steps: steps of single sequences that had ended, or were aborted, while the step was under way.
    transfer_seconds: of all writes of the cache, of which transfer_post_seconds in the transport's call, and
    transfer_exposed_seconds after the first token was there, when nothing hides them any more.
    handovers: caches handed over whole; per rank at prefill.   arrival_seconds: at decode, from the post of the last
    write until it was heard of, over timed_arrivals, which leave out prefill on another host.
    transfer_failures: at prefill, sum of refusals, timeouts and peer failures; at decode, landings that failed.
    checksum_failures: caches that did not land as they were sent.
    """

    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    free_slots: int = 0
    held_blocks: int = 0
    quarantined_blocks: int = 0
    open_landings: int = 0
    num_steps: int = 0
    steps_without_memory: int = 0
    wasted_steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    transfer_bytes: int = 0
    transfer_pieces: int = 0
    transfer_seconds: float = 0.0
    transfer_post_seconds: float = 0.0
    transfer_exposed_seconds: float = 0.0
    arrival_seconds: float = 0.0
    timed_arrivals: int = 0
    handovers: int = 0
    transfer_failures: int = 0
    transfer_refusals: int = 0
    transfer_timeouts: int = 0
    transfer_peer_failures: int = 0
    checksum_failures: int = 0
    stale_messages: int = 0


class WorkerInfo(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Everything the router and /topology show of a worker. endpoints: one per rank, empty until loaded."""

    id: str
    role: WorkerRole
    url: str
    state: WorkerState
    generation: int
    leader_pid: int
    reason: str = ""
    model: str = ""
    served_model_name: str = ""
    ranks: list[RankInfo] = []
    fingerprints: Fingerprints | None = None
    limits: Limits | None = None
    memory: MemorySummary | None = None
    transport: str = ""
    endpoints: list[bytes] = []
    stats: WorkerStats = WorkerStats()


# ---------------------------------------------------------------- the event stream


class SequenceOutput(Message, frozen=True, kw_only=True):
    """Tokens of one request in one step. `index` is the output index of the first: prefill's token is 0.

    A resumed request counts anew: its `num_prior_outputs` tokens have no index.
    logprobs: one for each token, if asked for.
    With an error the request is over and no token of it may be trusted beyond those already sent.
    """

    request_id: str
    index: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    error: ErrorBody | None = None


class StreamFrame(Message, frozen=True, kw_only=True):
    """One frame per step that produced something, and one every second when idle.

    number counts from 1 in a worker's life; a reader that reconnects asks for the next one it lacks.
    """

    number: int
    generation: int
    state: WorkerState
    outputs: list[SequenceOutput] = []
    stats: WorkerStats | None = None
    reason: str = ""


T = TypeVar("T", bound=Message)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return `message` as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Return the `kind` in `data`; raises msgspec.ValidationError or DecodeError naming the field."""
    return msgspec.msgpack.decode(data, type=kind)


def encode_frame(frame: StreamFrame) -> bytes:
    """Return four bytes of big-endian length, then the frame."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(4, "big") + body


class FrameDecoder:
    """Cuts a byte stream of any chunking into frames. One per connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(StreamFrame)

    def feed(self, data: bytes) -> Iterator[StreamFrame]:
        """Yield the frames completed by `data`. Raises ValueError for an impossible length."""
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {size} bytes: at most {MAX_FRAME_BYTES}; the stream is out of step")
            if len(self._buffer) < 4 + size:
                return
            body = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            yield self._decoder.decode(body)
