"""What the leader tells its ranks, and what they answer: small integers only, no torch.

Every rank gets the same messages in the same order over its ring. A rank keeps, per running sequence, the block
table and the sampling state, so that a step carries only what is new.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kv_transfer.landing import Landing
from router.protocol import ExchangeInfo, NumaBinding, SamplingParams, TokenLogprobs, WorkerState

PREVIOUS = -1
"""In place of a step's only token: the one that the sequence's step before has sampled, known to the rank alone yet."""

NO_MEMORY = "out of memory"
CACHE_CORRUPT = "the cache that arrived is not what was sent: "
GUIDE_FAILED = "the guide of the answer failed: "
"""How reasons begin that lie in the request's own grammar; those of CACHE_CORRUPT lie in the transfer."""


class PlanMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of every message on the ring; the type travels as a tag."""


# ---------------------------------------------------------------- leader -> rank


class SequenceBranch(PlanMessage, frozen=True, kw_only=True, array_like=True):
    """One more answer to a sequence's prompt: where that samples, a token is drawn for `seq` too."""

    seq: int
    sampling: SamplingParams


class SequenceStart(PlanMessage, frozen=True, kw_only=True):
    """A sequence enters: from now on `seq` stands for it. seq numbers are never used twice.

    token_ids: the prompt, needed by penalties, then outputs known so far (the last `num_outputs`).
    block_ids: those held now; later ones come with the step that first needs them.
    branches: they leave with the sequence, which ends with the first token it samples.
    checksums: by rank, what the cache that came from elsewhere must sum up to, by cache group; empty: not compared.
    """

    seq: int
    slot: int
    block_ids: list[int]
    sampling: SamplingParams
    token_ids: list[int] = []
    num_outputs: int = 0
    branches: list[SequenceBranch] = []
    checksums: list[dict[str, int]] = []


class SequenceStep(PlanMessage, frozen=True, kw_only=True, array_like=True):
    """Run `token_ids` at positions start.. of a sequence; sample one token after the last if `sample`.

    token_ids [PREVIOUS]: sent before the result of the step before. If that has failed, so has this, for its reason.
    """

    seq: int
    start: int
    token_ids: list[int]
    new_block_ids: list[int]
    sample: bool


class StepPlan(PlanMessage, frozen=True, kw_only=True):
    """One run of the model. `ends` leave first, then `starts` enter, then `steps` run (maybe none), oldest first.

    exhaust: a test seam: memory fails at this operation of the step; 0: it does not.
    """

    number: int
    starts: list[SequenceStart] = []
    steps: list[SequenceStep] = []
    ends: list[int] = []
    exhaust: int = 0


class PushPlan(PlanMessage, frozen=True, kw_only=True):
    """Write blocks `first`..`last`-1 (indices into the sequence's block list) of a sequence into its landing.

    block_ids, slot: the source. With is_last also the slot's record goes, and the notification with the first token.
    The blocks stay held by the sequence until the rank has answered PushDone for the last, or for the cancel.
    checksum: take checksums of what is written, of every push of the landing; they go with the last.
    ordered_at: of time.monotonic().
    fails: a test seam: the transport's call raises.
    """

    landing: Landing
    block_ids: list[int]
    slot: int
    first: int
    last: int
    is_last: bool = False
    first_token: int = -1
    checksum: bool = False
    ordered_at: float = 0.0
    fails: bool = False


class CancelPush(PlanMessage, frozen=True, kw_only=True):
    """Start no further write for this landing; when those under way have ended, say drained to the peer."""

    landing: Landing


class ConnectPeer(PlanMessage, frozen=True, kw_only=True):
    """Connect to the decode rank behind `endpoint` (this prefill rank writes to it) and warm the lane."""

    endpoint: bytes


class DisconnectPeer(PlanMessage, frozen=True, kw_only=True):
    """Forget every agent of that decode generation."""

    generation: int


class PumpHint(PlanMessage, frozen=True, kw_only=True):
    """How many landings are open: the rank looks for notifications often while there are any."""

    open_landings: int


class Profile(PlanMessage, frozen=True, kw_only=True):
    """Profile the next `steps` steps; 0: give up the profile that is under way. Rank 0 alone does, and answers."""

    number: int
    steps: int


class Shutdown(PlanMessage, frozen=True, kw_only=True):
    """End the process after transfers under way have ended."""


LeaderMessage = StepPlan | PushPlan | CancelPush | ConnectPeer | DisconnectPeer | PumpHint | Profile | Shutdown


# ---------------------------------------------------------------- rank -> leader


class RankProgress(PlanMessage, frozen=True, kw_only=True):
    """Where the rank is on its way to ready."""

    rank: int
    state: WorkerState
    detail: str = ""


class MeasuredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's device holds once all is allocated and captured, in bytes.

    device_bytes, free_bytes: as CUDA tells, after the allocator has given back what it does not use.
    weight_bytes: when they were loaded and the model was built.   workspace_bytes: what the allocator holds beyond
    weights and pools, the tensors of graphs included.   graph_bytes: what captures took besides.
    graph_nodes: of each graph, by the sequences that it has room for, or tokens in prefill; each was captured, and
    replayed once.
    """

    device_bytes: int
    free_bytes: int
    weight_bytes: int
    workspace_bytes: int
    graph_bytes: int
    graph_nodes: dict[int, int] = {}


class RankReady(PlanMessage, frozen=True, kw_only=True):
    """The rank can take plans. endpoint: encoded kv_transfer Endpoint.   memory: None on the CPU.   exchange: None for
    a rank alone."""

    rank: int
    pid: int
    device: str
    numa: NumaBinding
    transport: str
    endpoint: bytes
    model_fingerprint: str
    memory: MeasuredMemory | None = None
    exchange: ExchangeInfo | None = None


class StepResult(PlanMessage, frozen=True, kw_only=True):
    """Tokens of step `number`, (seq, token_id) for each sequence and branch that sampled.

    logprobs: by sequence or branch, where they were asked for.

    failed: sequences whose own computation failed (seq, reason); the others are unharmed. With the reason NO_MEMORY
    nothing has happened to the sequence but that it has its new blocks: the same step may be tried again.
    """

    rank: int
    number: int
    tokens: list[tuple[int, int]] = []
    failed: list[tuple[int, str]] = []
    logprobs: list[tuple[int, TokenLogprobs]] = []


class PushDone(PlanMessage, frozen=True, kw_only=True):
    """One push ended, or, with drained, the landing will never be written again by this rank.

    status "undelivered": the drained word could not be sent, the leader must say it by HTTP.
    Times and cause: see kv_transfer.writer.WriterEvent.
    """

    rank: int
    key: int
    generation: int
    status: Literal["done", "failed", "drained", "undelivered"]
    is_last: bool = False
    num_bytes: int = 0
    num_pieces: int = 0
    seconds: float = 0.0
    post_seconds: float = 0.0
    exposed_seconds: float = 0.0
    error: str = ""
    cause: Literal["", "refused", "peer", "deadline"] = ""


class PeerLinked(PlanMessage, frozen=True, kw_only=True):
    """Outcome of ConnectPeer. Figures: see kv_transfer.link_test.Link."""

    rank: int
    agent: str
    generation: int
    transport: str = ""
    lane: str = ""
    warmup_us: float = 0.0
    latency_us: float = 0.0
    gb_per_s: float = 0.0
    copy_gb_per_s: float = 0.0
    staging_pages: dict[int, int] = {}
    error: str = ""


class Arrived(PlanMessage, frozen=True, kw_only=True):
    """A notification came in at a decode rank: encoded kv_transfer Notification, unread. at: of time.monotonic()."""

    rank: int
    agent: str
    notification: bytes
    at: float = 0.0


class Profiled(PlanMessage, frozen=True, kw_only=True):
    """What came of Profile `number`. report: JSON, see engine.step_profiler.report_of.   error: why there is none."""

    rank: int
    number: int
    report: bytes = b""
    error: str = ""


class RankFailed(PlanMessage, frozen=True, kw_only=True):
    """The rank can't go on; it ends after this.

    follows: it has lost the others of its group. One of them knows better why, or its death does.
    is_refusal: it does not serve what it was given, a checkpoint or settings, and would not if it were started again.
    """

    rank: int
    reason: str
    follows: bool = False
    is_refusal: bool = False


RankMessage = RankProgress | RankReady | StepResult | PushDone | PeerLinked | Arrived | Profiled | RankFailed


def encode(message: PlanMessage) -> bytes:
    return msgspec.msgpack.encode(message)


_leader_decoder = msgspec.msgpack.Decoder(LeaderMessage)
_rank_decoder = msgspec.msgpack.Decoder(RankMessage)


def decode_leader_message(data: bytes) -> LeaderMessage:
    return _leader_decoder.decode(data)


def decode_rank_message(data: bytes) -> RankMessage:
    return _rank_decoder.decode(data)
