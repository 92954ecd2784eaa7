"""Starting one worker group by hand: flags in, a leader that spawns its own ranks, an exit code out."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.flags import ConfigError, add_engine_flags, engine_config, parse_flags
from engine.leader import REFUSED
from router.protocol import WorkerRole

_EXAMPLE = """\
example: a cluster of three terminals
  python -m prefill_worker --model ./dsv4 --dtype float32 --kv-cache-dtype fp32 --port 8001
  python -m decode_worker  --model ./dsv4 --dtype float32 --kv-cache-dtype fp32 --port 8002
  python -m router --model ./dsv4 --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002

Every flag has an environment twin: --max-num-seqs is ISTHMUS_MAX_NUM_SEQS; the flag wins.
"""


def run_role(role: WorkerRole, run: Callable[..., int], argv: list[str] | None) -> int:
    """Parse `argv` and run one group; configuration errors become one line on stderr and exit code REFUSED."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {role}_worker",
        description=f"One {role} group of an Isthmus cluster: a leader that serves HTTP to the router, and its ranks.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_flags(parser)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = engine_config(parse_flags(parser, argv), role=role, yaml_section=None, environ=os.environ)
        config = msgspec.structs.replace(config, worker_id=config.worker_id or f"{role}-{os.getpid()}")
        with tempfile.TemporaryDirectory(prefix=f"isthmus-{role}-") as run_dir:
            return run(config, Path(run_dir), spawn_ranks=True)
    except (ConfigError, ValueError, OSError) as e:
        print(f"{role}_worker: {e}", file=sys.stderr)
        return REFUSED
