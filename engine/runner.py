"""ModelRunner: runs StepPlans on one rank, for prefill and decode alike.

It owns the model, the cache and what the rank remembers of its sequences. A decode step is a plan whose steps have one
token each; there is no other difference.

Failing closed: a sequence whose activations or logits are not finite is reported as failed and gets no token; its
neighbours go on, since no operation mixes rows of different sequences.

Where decode kernels run, steps of one token a sequence are replayed graphs (decode_graphs.py): `launch` returns while
they run, and the next may be launched behind them. All other steps (eager_steps.py) have ended when
`launch` returns; short chunks of prompts are replayed graphs, too (chunk_graphs.py).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.batch import RunningSequences
from engine.cache import KVCache
from engine.cache_check import corrupt_starts
from engine.chunk_graphs import ChunkGraphs
from engine.config import EngineConfig
from engine.decode_graphs import DecodeGraphs, LaunchedStep
from engine.eager_steps import NOT_FINITE, EagerSteps, Outcome
from engine.expert_cut import shares_experts
from engine.grammar import Grammars
from engine.graph_sizes import CHUNK_CONTEXT, chunk_sizes, graph_sizes
from engine.model.attention import runs_decode_kernels
from engine.model.config import ConfigError
from engine.model.group import Alone, Group
from engine.model.layout import build_layout
from engine.model.model import DeepSeekV4
from engine.model.moe import keeps_packed
from engine.model.parts import WeightPart
from engine.model.shard import Shard
from engine.model.synthetic import synthetic_weights
from engine.model.weight_cache import read_weights
from engine.plan import GUIDE_FAILED, SequenceStep, StepPlan
from engine.served_model import served_fingerprint, served_model
from router.protocol import ExchangeInfo, TokenLogprobs

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(slots=True)
class Ticket:
    """A plan that was launched. outcome: so far.   steps, launched: of a graph that runs.

    After `collect`, where times are taken:
    gpu_ms: what its step took on the device.   gap_ms: how long the device was idle between the step before and this.
    """

    outcome: Outcome
    steps: Sequence[SequenceStep] = ()
    launched: LaunchedStep | None = None
    gpu_ms: float | None = None
    gap_ms: float | None = None

    @property
    def is_ready(self) -> bool:
        """`collect` would not wait."""
        return self.launched is None or self.launched.is_ready


class ModelRunner:
    """One rank's model and cache.

    on_logits: if set, called with (seq, position of the last token, its logits [V] float32) for each sequence that
    samples: a seam for tests.   times: measure steps that are graphs, see Ticket; set it before `load`.
    """

    def __init__(
        self, config: EngineConfig, *, num_blocks: int, num_slots: int, rank: int = 0, group: Group | None = None
    ) -> None:
        """Allocate the cache. Raises ConfigError for a model that can't be served, ValueError for a bad block size.

        group: the ranks that this one computes with, each a part of the model; None: it computes the whole model, or
        the part that it is told to play.
        """
        self.config, self._rank, self.group = config, rank, group or Alone()
        self._whole_config = served_model(config).config
        by_expert = shares_experts(config, self._whole_config)
        self._shard = Shard.parse(config.simulate_rank, by_expert=by_expert)
        if self.group.count > 1:
            self._shard = Shard(self.group.index, self.group.count, by_expert)
        self.model_config = self._shard.of(self._whole_config)
        self.model_fingerprint = served_fingerprint(config)
        # One of a group has named its GPU before, as NCCL wants it; ranks of one process may share one.
        self.device = torch.device(config.device)
        if config.device == "cuda" and self.group.count > 1:
            self.device = torch.device(config.device, torch.cuda.current_device())
        layout = build_layout(
            self.model_config,
            block_tokens=config.block_size,
            kv_cache_dtype=config.kv_cache_dtype,
            index_cache_dtype=config.index_cache_dtype,
        )
        self.cache = KVCache(layout, num_blocks, num_slots, self.device)
        if config.pool_poison:
            self.cache.poison()
        self._grammars = Grammars(
            Path(config.model) / "tokenizer.json", self.model_config.vocab_size, self.model_config.eos_token_ids
        )
        self.sequences = RunningSequences(
            num_blocks=num_blocks,
            num_slots=num_slots,
            block_tokens=config.block_size,
            vocab_size=self.model_config.vocab_size,
            eos=self.model_config.eos_token_ids,
            grammars=self._grammars,
        )
        self.on_logits: Callable[[int, int, Tensor], None] | None = None
        self._corrupt: dict[int, str] = {}  # sequences whose cache is not what was sent
        num_scored = self._shard.head_rows(self._whole_config) * self.group.count
        self._eager = EagerSteps(self.cache, self.sequences, vocab_size=num_scored)
        self._model: DeepSeekV4 | None = None
        self._graphs: DecodeGraphs | None = None
        self._chunks: ChunkGraphs | None = None
        self._ended: torch.cuda.Event | None = None  # of the last step that was collected
        self.times = False

    @property
    def model(self) -> DeepSeekV4:
        """Return the loaded model. Raises RuntimeError before `load`."""
        if self._model is None:
            raise RuntimeError("the model is not loaded: call load() before run()")
        return self._model

    def exchange_info(self, exchange: ExchangeInfo | None) -> ExchangeInfo | None:
        """Return how this rank exchanges, with how it and the others have cut the experts."""
        if exchange is None:
            return None
        return msgspec.structs.replace(exchange, experts="expert" if self._shard.by_expert else "inner")

    @property
    def graph_nodes(self) -> dict[int, int]:
        """Return the nodes of each captured graph, by the sequences or tokens of prompts that it has room for."""
        graphs = self._graphs or self._chunks
        return {} if graphs is None else graphs.nodes

    @property
    def state_bytes(self) -> int:
        """Return bytes that graphs keep on the device from `load` on, besides weights and cache."""
        graphs = self._graphs or self._chunks
        return 0 if graphs is None else graphs.state_bytes

    def load(self, progress: Callable[[str], None] | None = None) -> None:
        """Read the weights; `progress` gets a line of text now and then. Raises WeightsError."""
        keeps = keeps_packed(self.device)
        dtype = DTYPES[self.config.dtype]
        if self.config.load_format == "synthetic":
            weights: dict[str, Tensor] | Iterator[WeightPart] = synthetic_weights(
                self._whole_config, self._shard, dtype=dtype, device=self.device, keeps_packed=keeps, progress=progress
            )
        else:
            weights = read_weights(
                self.config.model,
                self._whole_config,
                dtype=dtype,
                device=self.device,
                keeps_packed=keeps,
                shard=self._shard,
                progress=progress,
                cache=self.config.weight_cache,
            )
        self._model = DeepSeekV4(
            self.model_config,
            weights,
            index_hadamard=self.config.uses_hadamard,
            group=self.group,
            device=self.device,
        )
        if self.device.type == "cuda":  # elsewhere a step takes longer than the tables do
            self._grammars.warm()
        if not runs_decode_kernels(self.cache, self.device):
            return
        captures = self.device.type == "cuda" and not self.config.enforce_eager
        if self.config.role == "prefill" and captures and self._all_capturable():
            self._chunks = ChunkGraphs(
                self._model,
                self.cache,
                sizes=chunk_sizes(self.config.max_num_batched_tokens),
                sequences=self.config.max_num_seqs,
                longest=CHUNK_CONTEXT,
            )
        if self.config.role == "decode":
            self._graphs = DecodeGraphs(
                self._model,
                self.cache,
                sizes=graph_sizes(self.config.max_num_seqs),
                max_blocks=self.max_blocks,
                captures=captures,
                times=self.times,
            )

    def _all_capturable(self) -> bool:
        """Return whether every rank's model may be captured.

        One rank's slice of the experts may be packed, another's not. A graph exchanges padding tokens, too: with some
        in graphs and some not the ranks would be out of step.
        """
        problem = self.model.uncapturable
        if not self.group.agree([bool(problem)])[0]:
            return True
        log.warning("short prompts are not captured, and slower: %s", problem or "another rank's model can't be")
        return False

    def capture(self, progress: Callable[[str], None] | None = None) -> None:
        """Capture decode steps as graphs, every size that may be admitted; of a prefill rank, short chunks.

        Before it, they run uncaptured. Raises ConfigError for a model or cache whose decode steps can't be captured: a
        GPU serves none that are not. Chunks that can't are slower.
        """
        if self.device.type != "cuda" or self.config.enforce_eager:
            return
        if self._model is None:
            raise RuntimeError("the model is not loaded: call load() before capture()")
        graphs = self._graphs or self._chunks
        problem = self._model.uncapturable
        if self._graphs is None:
            problem = f"kv_cache_dtype {self.config.kv_cache_dtype} has no decode kernels; packed has"
        if self.config.role == "decode" and (problem or self._graphs is None):
            raise ConfigError(
                f"decode steps can't be captured as CUDA graphs: {problem}; serve another form of the checkpoint or of "
                "the cache, or set enforce_eager (for tests: steps that are not captured are slow)"
            )
        if graphs is not None:
            with torch.inference_mode():
                graphs.capture(progress)
        self._eager.graphs = self._chunks

    @property
    def max_blocks(self) -> int:
        """Return the blocks of the longest sequence."""
        longest = self.config.max_model_len or self.model_config.max_position_embeddings
        return min(self.cache.layout.num_blocks_for(longest), self.cache.num_blocks)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """Begin a plan, behind those begun before.

        Ends leave first, then starts enter, then steps run. Raises PlanError if leader and rank are out of step.
        """
        for seq in plan.ends:
            self.sequences.end(seq)
            self._corrupt.pop(seq, None)
            if self._graphs is not None:
                self._graphs.leave(seq)
        for start in plan.starts:
            self.sequences.start(start)
        self._corrupt |= corrupt_starts(plan.starts, self.cache, rank=self._rank, group=self.group)
        steps, failed = self._sort_out(plan)
        problems = dict(failed)
        self.sequences.note([s for s in plan.steps if s.seq in problems], {}, problems)
        if not steps:
            return Ticket(Outcome([], failed))
        model = self.model
        if self._graphs is not None and all(self._is_decode(step) for step in steps):
            return self._launch_graph(self._graphs, steps, failed)
        if self._graphs is not None:  # rows on the device know nothing of what runs here
            for step in steps:
                self._graphs.leave(step.seq)
        self._eager.on_logits = self.on_logits
        outcome = self._eager.run(model, steps, exhaust=plan.exhaust)
        self.sequences.note(steps, dict(outcome.tokens), dict(outcome.failed))
        return Ticket(outcome._replace(failed=failed + outcome.failed))

    def collect(self, ticket: Ticket) -> Outcome:
        """Wait for a plan's tokens. Tickets are collected in order, and at most two are out.

        A failed sequence stays until the plan that ends it; one that failed for NO_MEMORY is as it was before the plan.
        """
        if ticket.launched is None:
            return ticket.outcome
        step = ticket.launched
        step.wait()
        if step.begun is not None and step.ended is not None:
            ticket.gpu_ms = step.begun.elapsed_time(step.ended)
            ticket.gap_ms = None if self._ended is None else self._ended.elapsed_time(step.begun)
            self._ended = step.ended
        outcome = ticket.outcome
        tokens, logprobs, failed = list(outcome.tokens), list(outcome.logprobs), list(outcome.failed)
        tops = None if step.logprobs is None else [values.tolist() for values in step.logprobs]
        ends = step.ends.tolist()
        for sequence, row in zip(step.sequences, step.rows, strict=True):
            token, is_finite = ends[row]
            if not is_finite:
                failed.append((sequence.seq, NOT_FINITE))
                continue
            sequence.sampling.add(token)
            tokens.append((sequence.seq, token))
            wanted = sequence.sampling.params.num_logprobs
            if wanted >= 0 and tops is not None:
                of_token, ids, of_top = (values[row] for values in tops)
                logprobs.append(
                    (
                        sequence.seq,
                        TokenLogprobs(logprob=of_token, top_ids=ids[:wanted], top_logprobs=of_top[:wanted]),
                    )
                )
        self.sequences.note(ticket.steps, dict(tokens), dict(failed))
        ticket.outcome, ticket.launched = Outcome(tokens, failed, logprobs), None
        return ticket.outcome

    def run(self, plan: StepPlan) -> Outcome:
        """Carry out a plan; see `launch` and `collect`."""
        return self.collect(self.launch(plan))

    def _sort_out(self, plan: StepPlan) -> tuple[list[SequenceStep], list[tuple[int, str]]]:
        """Return the steps of a plan that can run, and why others can't."""
        failed: list[tuple[int, str]] = []
        steps: list[SequenceStep] = []
        for step in plan.steps:
            if problem := self._corrupt.get(step.seq) or self.sequences.problem_of(step):
                self.sequences.skip(step)
                failed.append((step.seq, problem))
            else:
                steps.append(step)
        return steps, failed

    def _is_decode(self, step: SequenceStep) -> bool:
        return len(step.token_ids) == 1 and step.sample and not self.sequences[step.seq].branches

    def _launch_graph(self, graphs: DecodeGraphs, steps: list[SequenceStep], failed: list[tuple[int, str]]) -> Ticket:
        for step in steps:
            if not graphs.holds(step.seq):
                self.sequences.tokens_of(step)  # a row that is new has no token of an earlier step, but somebody else's
        sequences = self.sequences.take(steps)
        graphs.on_logits = self.on_logits
        refused = {s.seq: GUIDE_FAILED + reason for s, reason in graphs.admit(sequences)}
        outcome = Outcome([], failed + list(refused.items()))
        self.sequences.note([s for s in steps if s.seq in refused], {}, refused)
        steps = [s for s in steps if s.seq not in refused]
        if not steps:
            return Ticket(outcome)
        return Ticket(outcome, steps, graphs.launch(steps, [s for s in sequences if s.seq not in refused]))
