"""Grammar masks: which tokens a guided answer may go on with, from the library `llguidance`.

Nothing here waits while a step runs: compiling, taking in a token and computing the next mask happen in a thread, from
the moment they are possible, that is while the leader plans and the device computes; the sampler collects the result.
The library gives up Python's lock for all of it but its tables of the tokenizer, which take half a second once.

A mask holds every token that some text of the grammar goes on with; where the next characters are forced, only the one
that the tokenizer would cut from them, so that what is forced is written as the model would write it. Special tokens
are no text: of those only the ends are ever allowed.

A grammar that can't be compiled, meets a limit, or is not done in PATIENCE_S fails its own sequence with a reason. The
last should never happen: the router tries each grammar before (router/grammar_check.py). What hangs can't be stopped,
so its thread is lost; with MAX_LOST of them this rank guides no more, but goes on.
"""

from __future__ import annotations

import collections
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from router.protocol import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

NUM_CACHED = 64
NUM_THREADS = 4
PATIENCE_S = 10.0
MAX_LOST = 8

_Job = tuple[Future[NDArray[np.int32]], Callable[..., NDArray[np.int32]], tuple[Any, ...]]


class GrammarError(Exception):
    """Why a guided sequence can't go on; the message is for its client."""


class GrammarState:
    """The guide of one sequence: unguided up to `after_token_id`, then a mask for each token."""

    def __init__(self, grammars: Grammars, guide: Guide, outputs: Sequence[int]) -> None:
        """outputs: tokens that the answer has already; those behind `after_token_id` must match the grammar."""
        self._grammars = grammars
        self._after = guide.after_token_id
        self._waits = self._after >= 0 and self._after not in outputs
        known = outputs[outputs.index(self._after) + 1 :] if self._after >= 0 and not self._waits else outputs
        self._matcher: LLMatcher | None = None
        self._mask = grammars.submit(self._begin, guide.grammar, () if self._waits else tuple(known))

    def mask(self) -> NDArray[np.int32] | None:
        """Return the allowed tokens, bit i of word w for token 32 w + i; None: all are. Raises GrammarError."""
        return None if self._waits else self._grammars.result(self._mask)

    def accept(self, token_id: int) -> None:
        """Take in a token that was chosen. One that the mask forbids makes the next mask() raise."""
        if self._waits:
            self._waits = token_id != self._after
        else:
            self._mask = self._grammars.submit(self._advance, self._mask, (token_id,))

    def _begin(self, grammar: str, tokens: tuple[int, ...]) -> NDArray[np.int32]:
        self._matcher = self._grammars.matcher(grammar)
        return self._consume(tokens)

    def _advance(self, before: Future[NDArray[np.int32]], tokens: tuple[int, ...]) -> NDArray[np.int32]:
        before.result(PATIENCE_S)  # it has ended, or runs: it was taken up before this
        return self._consume(tokens)

    def _consume(self, tokens: tuple[int, ...]) -> NDArray[np.int32]:
        matcher = self._matcher
        assert matcher is not None
        taken = matcher.try_consume_tokens(list(tokens)) if tokens else 0
        # Behind a text that can't go on the library takes no end, though its mask has them.
        if matcher.is_stopped() and self._grammars.eos.issuperset(tokens[taken:]):
            taken = len(tokens)
        if taken < len(tokens) and not matcher.is_error():
            raise GrammarError(f"the grammar does not allow token {tokens[taken]}, output {taken} under it")
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        if matcher.is_error():
            raise GrammarError(f"the grammar can't go on: {_first_line(matcher.get_error())}")
        return words


class Grammars:
    """Compiled grammars of one model folder, and the threads that work on them. Tables are built on first use."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos: Sequence[int]) -> None:
        """eos: the ids that end an answer, allowed exactly where its grammar may end."""
        self.eos = frozenset(eos)
        self._file, self._vocab_size = tokenizer_file, vocab_size
        self._compiled: collections.OrderedDict[str, LLMatcher] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._num_threads = self._num_lost = 0

    def start(self, guide: Guide, outputs: Sequence[int]) -> GrammarState:
        """Return the state of a sequence with these outputs; see GrammarState."""
        return GrammarState(self, guide, list(outputs))

    def warm(self) -> None:
        """Build the tables now: the first guided sequence would make all others wait for it."""
        try:
            with self._lock:
                self._tokenizer  # noqa: B018
        except GrammarError as error:
            log.warning("no guided decoding: %s", error)

    def submit(self, function: Callable[..., NDArray[np.int32]], *args: object) -> Future[NDArray[np.int32]]:
        """Run it in a thread. Fetch its result by `result`."""
        future: Future[NDArray[np.int32]] = Future()
        if self._num_lost >= MAX_LOST:
            future.set_exception(GrammarError("this worker guides no more: too many grammars have made it hang"))
        else:
            self._start_threads()
            self._jobs.put((future, function, args))
        return future

    def result(self, future: Future[NDArray[np.int32]]) -> NDArray[np.int32]:
        """Return what a submitted function has returned. Raises GrammarError, and nothing else."""
        try:
            return future.result(PATIENCE_S)
        except TimeoutError:
            self._num_lost += 1
            log.error("a grammar is not done after %g s: its thread, number %d, is lost", PATIENCE_S, self._num_lost)
            future.add_done_callback(self._on_late)
            raise GrammarError(f"the grammar is too complex: no mask after {PATIENCE_S:g} s") from None

    def _on_late(self, future: Future[NDArray[np.int32]]) -> None:
        """Hear that a thread was only slow: a busy machine must not end all guiding."""
        with self._lock:
            self._num_lost -= 1

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the start of `grammar`. Raises GrammarError if it can't be compiled."""
        with self._lock:
            tokenizer, compiled = self._tokenizer, self._compiled.pop(grammar, None)
        # Not under the lock: it may take its time, and nobody else is to wait for it.
        compiled = compiled or _compile(grammar, tokenizer)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > NUM_CACHED:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def _start_threads(self) -> None:
        """Keep NUM_THREADS at work besides those that are lost; daemons, since a lost one must not hold up the exit."""
        while self._num_threads < NUM_THREADS + self._num_lost:
            self._num_threads += 1
            name = f"grammar-{self._num_threads}"
            threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer

            if self._file.exists() and not self._file.is_file():  # to open a pipe is to wait for who writes into it
                raise ValueError("it is not a regular file")
            return LLTokenizer(str(self._file), n_vocab=self._vocab_size, eos_token=sorted(self.eos))
        except Exception as error:  # the library names no type of its own
            raise GrammarError(f"{self._file.name} of the model can't be used for guided decoding: {error}") from error


def _compile(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    # Imported here: ranks that never see a guide need not have it.
    from llguidance import LLMatcher, LLParserLimits

    # States are memory, 1 to 2 KB each. The library's other limits are a hundred times what schemas need.
    limits = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(f"the grammar can't be compiled: {_first_line(matcher.get_error())}")
    return matcher


def _work(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        future, function, args = jobs.get()
        try:
            future.set_result(function(*args))
        except GrammarError as error:
            future.set_exception(error)
        except BaseException as error:  # a panic of the library is no Exception
            log.exception("the grammar library failed")
            future.set_exception(GrammarError(f"the grammar library failed: {type(error).__name__}"))
        del future, function, args  # a matcher must not live until the next job


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:300]
