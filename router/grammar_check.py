"""GrammarChecker: compiles clients' grammars in a process of its own, so that a hostile one costs a bounded time.

The grammar library has limits, but not everywhere: some schemas of a few kilobytes keep it busy for minutes. A thread
in it can't be stopped; a process can. The kernel ends it when it has used up its processor time or its memory, and the
next check starts a new one. What passes compiles at the workers too, in about the same time.

    python -m router.grammar_check      (started by GrammarChecker; JSON lines in, JSON lines out, until its input ends)
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import llguidance

CPU_SECONDS = 0.5
MEMORY_BYTES = 1 << 30
PATIENCE_S = 10.0
NUM_CACHED = 1024
MAX_REASON_CHARS = 300
NUM_WALKS = 6
MAX_WALK_BYTES = 48


class Checked(NamedTuple):
    """grammar: in the library's own syntax.   problem: why it can't be used, shortened, or ""."""

    grammar: str
    problem: str


class CheckerBusy(Exception):
    """No answer in time, through no fault of the grammar that was asked about."""


class GrammarChecker:
    """Thread-safe; compiles one grammar at a time, and each only once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._known: OrderedDict[str, Checked] = OrderedDict()

    def check(self, text: str) -> Checked:
        """Return the grammar in `text`: Lark, GBNF (`root ::= ...`), or the library's JSON. Raises CheckerBusy."""
        if not self._lock.acquire(timeout=PATIENCE_S):
            raise CheckerBusy("other grammars are being compiled")
        try:
            checked = self._known.pop(text, None) or self._ask(text)
            self._known[text] = checked
            if len(self._known) > NUM_CACHED:
                self._known.popitem(last=False)
            return checked
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process; a later check starts another."""
        with self._lock:
            self._stop()

    def _ask(self, text: str) -> Checked:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(text) + "\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], PATIENCE_S)[0]:
                self._stop()
                raise CheckerBusy(f"not compiled after {PATIENCE_S:g} s")
            if line := process.stdout.readline():
                return Checked(*json.loads(line))
        except BrokenPipeError:
            pass
        self._stop()
        return Checked(
            text, f"too complex: it takes more than {CPU_SECONDS:g} s or {MEMORY_BYTES >> 20} MiB to work with"
        )

    def _start(self) -> subprocess.Popen[str]:
        # Its errors are those of a process that is meant to be ended by signals: nothing to log.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "router.grammar_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def __del__(self) -> None:
        self._stop()


class _Bytes:
    """The smallest tokenizer: every byte, and an end. Which tokens there are does not matter to what is checked."""

    eos_token_id = 256
    bos_token_id = None
    tokens: Sequence[bytes] = [*(bytes([i]) for i in range(256)), b"<end>"]
    special_token_ids: Sequence[int] = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), eos_token=[256], slices=[])
    limits = llguidance.LLParserLimits(max_lexer_states=20_000, verbose_errors=False)

    def check(text: str) -> Checked:
        if not text.startswith("{"):
            try:
                text = llguidance.grammar_from("grammar", text)
            except Exception as error:  # the library's reader of GBNF is Python, and fails in many ways
                return Checked("", _reason(str(error) or type(error).__name__))
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            walks = [matcher.deep_copy() for _ in range(NUM_WALKS)]
            matcher.compute_bitmask()  # finds what has no answer at all
            for number, walk in enumerate(walks if not matcher.is_error() else ()):
                _walk(walk, random.Random(number))
        return Checked(text, _reason(matcher.get_error()) if matcher.is_error() else "")

    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # the signal's default is to end the process
        checked = check(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(checked), flush=True)


def _walk(matcher: llguidance.LLMatcher, rng: random.Random) -> None:
    """Write the beginning of an answer: some grammars keep the library busy for ever, but only in the middle of one."""
    for _ in range(MAX_WALK_BYTES):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if not allowed or matcher.is_error() or not matcher.consume_token(rng.choice(allowed)):
            break


def _reason(text: str) -> str:
    """Return what a client can use of an error: its lines, but for those that draw the place in the grammar."""
    lines = [line.strip() for line in text.split("<non-verbose/>")[0].splitlines()]
    reason = " ".join(line for line in lines if line and not re.match(r"\d+ \||\^+$", line))
    reason = reason.removeprefix("NoExtensionBias") or "no text matches it"
    return reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 3] + "..."


if __name__ == "__main__":
    main()
