"""Measure grammar libraries: `isthmus bench guides`, the same as `python -m router.guided_bench --model FOLDER`.

Each library that is installed (we use llguidance; xgrammar is measured beside it if it is there) works in a process of
its own, on one thread, on the tokenizer of the model folder.

    start     importing it, and building its tables of the tokenizer: seconds, resident memory added, and how long other
              threads of the process stood still meanwhile
    masks     along an answer that fits: compiling (median of --repeats), then one mask and one accepted token at each
              position, all answers of a case together
    keywords  of JSON schema: enforced, refused with an error, or ignored: a document that breaks the rule passes
    hostile   grammars that were made to be slow, each in a child with --limit seconds of processor time: what became
              of compiling it and of its first mask
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from router.guided_cases import KEYWORDS, fitting_answers, hostile
from router.tokenizer import TOKENIZER_FILE, Tokenizer

LIBRARIES = ("llguidance", "xgrammar")
EOS = "<｜end▁of▁sentence｜>"


class Matcher(Protocol):
    """One answer under one grammar. mask: compute the next.   accept: take a token in; False if it does not fit."""

    def mask(self) -> object: ...
    def accept(self, token_id: int) -> bool: ...
    def may_end(self) -> bool: ...


class Library(Protocol):
    """compile raises ValueError if the library refuses. kind: "schema" or "regex"."""

    def compile(self, kind: str, source: str) -> Callable[[], Matcher]: ...


class LLGuidance:
    def __init__(self, folder: Path, tokenizer: Tokenizer, eos: int) -> None:
        self._module: Any = importlib.import_module("llguidance")
        self._tables = self._module.LLTokenizer(str(folder / TOKENIZER_FILE), eos_token=[eos])

    def compile(self, kind: str, source: str) -> Callable[[], Matcher]:
        matcher = self._module.LLMatcher
        make = {"schema": matcher.grammar_from_json_schema, "regex": matcher.grammar_from_regex}[kind]
        compiled = matcher(self._tables, make(source), log_level=0)
        if compiled.is_error():
            raise ValueError(compiled.get_error())

        class One:
            def __init__(self) -> None:
                self._matcher = compiled.deep_copy()

            def mask(self) -> object:
                found = self._matcher.compute_bitmask()
                if self._matcher.is_error():
                    raise ValueError(self._matcher.get_error())
                return found

            def accept(self, token_id: int) -> bool:
                return bool(self._matcher.consume_token(token_id))

            def may_end(self) -> bool:
                return bool(self._matcher.is_accepting())

        return One


class XGrammar:
    def __init__(self, folder: Path, tokenizer: Tokenizer, eos: int) -> None:
        module: Any = importlib.import_module("xgrammar")
        self._module = module
        vocabulary = [b"" if i in tokenizer.special_ids else data for i, data in enumerate(tokenizer.token_bytes)]
        info = module.TokenizerInfo(vocabulary, module.VocabType.RAW, stop_token_ids=[eos])
        self._compiler = module.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = module.allocate_token_bitmask(1, len(vocabulary))

    def compile(self, kind: str, source: str) -> Callable[[], Matcher]:
        try:
            if kind == "regex":
                compiled = self._compiler.compile_regex(source)
            else:  # not strict: what a schema does not speak of is allowed, as the standard has it
                compiled = self._compiler.compile_json_schema(source, strict_mode=False)
        except Exception as error:
            raise ValueError(str(error)) from error
        new, mask = self._module.GrammarMatcher, self._mask

        class One:
            def __init__(self) -> None:
                self._matcher = new(compiled)

            def mask(self) -> object:
                return self._matcher.fill_next_token_bitmask(mask)

            def accept(self, token_id: int) -> bool:
                return bool(self._matcher.accept_token(token_id))

            def may_end(self) -> bool:
                return bool(self._matcher.is_completed())

        return One


def measure_start(name: str, folder: Path, eos: int) -> tuple[Library, dict[str, Any]]:
    before, begun = _resident_mib(), time.perf_counter()
    importlib.import_module(name)
    imported, with_import = time.perf_counter(), _resident_mib()
    brings = [module for module in ("torch", "transformers") if module in sys.modules]
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    read, with_tokenizer = time.perf_counter(), _resident_mib()
    with _Stall() as stall:
        library: Library = (LLGuidance if name == "llguidance" else XGrammar)(folder, tokenizer, eos)
    built = time.perf_counter()
    return library, {
        "import_s": imported - begun,
        "import_mib": with_import - before,
        "imports": brings,
        "tables_s": built - read,
        "tables_mib": _resident_mib() - with_tokenizer,
        "stall_s": stall.longest_s,
    }


def measure_masks(library: Library, tokenizer: Tokenizer, *, repeats: int) -> Iterator[dict[str, Any]]:
    for name, kind, source, answers in fitting_answers():
        compiling = []
        make: Callable[[], Matcher] | None = None
        for _ in range(repeats):
            begun = time.perf_counter()
            try:
                make = library.compile(kind, source)
                make().mask()
            except ValueError as error:
                yield {"case": name, "refused": str(error).split("\n")[0][:120]}
                break
            compiling.append(time.perf_counter() - begun)
        else:
            assert make is not None
            masks, accepts, fits = [], [], True
            for answer in answers:
                matcher = make()
                for token_id in tokenizer.encode(answer):
                    begun = time.perf_counter()
                    matcher.mask()
                    masked = time.perf_counter()
                    fits = fits and matcher.accept(token_id)
                    accepts.append(time.perf_counter() - masked)
                    masks.append(masked - begun)
                fits = fits and matcher.may_end()
            yield {
                "case": name,
                "grammar_bytes": len(source),
                "compile_ms": statistics.median(compiling) * 1e3,
                "masks": len(masks),
                "mask_p50_us": _quantile(masks, 0.5) * 1e6,
                "mask_p99_us": _quantile(masks, 0.99) * 1e6,
                "mask_max_us": max(masks) * 1e6,
                "accept_p50_us": _quantile(accepts, 0.5) * 1e6,
                "fits": fits,
            }


def measure_keywords(library: Library, tokenizer: Tokenizer) -> dict[str, str]:
    def takes(make: Callable[[], Matcher], document: Any) -> bool:
        matcher = make()
        return all(map(matcher.accept, tokenizer.encode(json.dumps(document)))) and matcher.may_end()

    found = {}
    for name, (schema, good, bad) in KEYWORDS.items():
        try:
            make = library.compile("schema", json.dumps(schema))
        except ValueError:
            found[name] = "refused"
        else:
            found[name] = ("ignored" if takes(make, bad) else "enforced") if takes(make, good) else "too strict"
    return found


def measure_hostile(library: Library, *, limit_s: float) -> dict[str, str]:
    found = {}
    for name, (kind, source) in hostile().items():
        begun = time.perf_counter()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            try:
                library.compile(kind, source)().mask()
            except ValueError:
                os._exit(1)
            os._exit(0)
        _, status, usage = os.wait4(child, 0)
        seconds = usage.ru_utime + usage.ru_stime
        ended = {0: "compiled", 1: "refused"}.get(os.waitstatus_to_exitcode(status), "crashed")
        if os.WIFSIGNALED(status):
            ended = "stopped" if os.WTERMSIG(status) == signal.SIGPROF else f"crashed ({os.WTERMSIG(status)})"
        found[name] = f"{ended} after {seconds:.2f} s, {usage.ru_maxrss >> 10} MiB"
        print(f"  {name}: {found[name]}, {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    return found


# ---------------------------------------------------------------- the command


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m router.guided_bench") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with tokenizer.json")
    parser.add_argument("--repeats", type=int, default=5, help="compilations of each case (5)")
    parser.add_argument("--limit", type=float, default=10.0, help="processor seconds for a hostile grammar (10)")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.library:
        print(json.dumps(_measure(args.library, args)))
        return 0
    found = {}
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: left out", file=sys.stderr)
            continue
        command = [sys.executable, "-m", "router.guided_bench", "--model", str(args.model), "--library", name]
        command += ["--repeats", str(args.repeats), "--limit", str(args.limit)]
        found[name] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    results = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu(),
        "python": platform.python_version(),
        "libraries": found,
    }
    text = json.dumps(results, indent=1, ensure_ascii=False)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 0


def _measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.from_folder(args.model)
    eos = tokenizer.token_id(EOS) if tokenizer else None
    if tokenizer is None or eos is None:
        raise SystemExit(f"{args.model}: no {TOKENIZER_FILE} with {EOS}")
    library, start = measure_start(name, args.model, eos)
    return {
        "version": metadata.version(name),
        "requires": [r for r in metadata.requires(name) or [] if "extra ==" not in r],
        "vocab_size": tokenizer.vocab_size,
        "start": _rounded(start),
        "masks": [_rounded(row) for row in measure_masks(library, tokenizer, repeats=args.repeats)],
        "keywords": measure_keywords(library, tokenizer),
        "hostile": measure_hostile(library, limit_s=args.limit),
    }


class _Stall:
    """How long a thread that wants to run every millisecond had to wait at most."""

    longest_s = 0.0

    def __enter__(self) -> _Stall:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.perf_counter()
        while not self._is_over.wait(0.001):
            now = time.perf_counter()
            self.longest_s, last = max(self.longest_s, now - last), now
        self.longest_s = max(self.longest_s, time.perf_counter() - last)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in row.items()}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
