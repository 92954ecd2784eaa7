"""What `isthmus up` prints: one line per event with the seconds since the start; colour only on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from deploy.config import ClusterConfig


class Progress:
    def __init__(self, console: Console | None = None) -> None:
        # a descriptor of its own: this process's output is sent elsewhere while Ray runs in it
        self._console = console or Console(file=os.fdopen(os.dup(1), "w"), highlight=False, soft_wrap=True)
        self._begun = time.monotonic()

    def say(self, text: str) -> None:
        self._line(escape(text))

    def problem(self, text: str) -> None:
        self._line(f"[bold red]{escape(text)}[/]")

    def ready(self, config: ClusterConfig, topology: dict[str, Any], log_dir: Path) -> None:
        """Say that the cluster serves, on what, and how to try it."""
        numa = {rank["numa"]["status"] for worker in topology.get("workers", []) for rank in worker.get("ranks", [])}
        lanes = {f"{pair['transport']} over {pair['lane']}" for pair in topology.get("pairs", []) if pair.get("lane")}
        facts = [config.served_model_name, *sorted(lanes)]
        if numa:
            facts.append("NUMA " + ", ".join(sorted(numa)))
        self._line(f"[bold green]ready[/] at {config.router.url} ({escape('; '.join(facts))})")
        self._console.print(f"\n  {escape(example_request(config, has_tokenizer=has_tokenizer(config)))}\n")
        self._console.print(f"  logs: {escape(str(log_dir))}    {escape(own_command())} status    Ctrl-C stops it\n")

    def _line(self, markup: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._begun:6.1f} s[/]  {markup}")


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what this process and its native libraries print to a file; Progress goes on where it did."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def own_command() -> str:
    """Return what to type for `isthmus`: the path it was called by if it is not on PATH (`make serve` does so)."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "isthmus" and shutil.which("isthmus") is None else "isthmus"


def has_tokenizer(config: ClusterConfig) -> bool:
    return (Path(config.model) / "tokenizer.json").is_file()


def example_request(config: ClusterConfig, *, has_tokenizer: bool) -> str:
    """Return a curl command that the cluster will answer."""
    body: dict[str, Any] = {"model": config.served_model_name, "max_tokens": 16}
    if has_tokenizer:
        route, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello"}]
    else:
        route, body["prompt"] = "completions", [0, 5, 6, 7]
    return f"curl {config.router.url}/v1/{route} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
