"""`python -m decode_worker`: a decode group by hand, without Ray; the leader starts its own ranks."""

from __future__ import annotations

import sys

from decode_worker.leader import run
from engine.by_hand import run_role


def main(argv: list[str] | None = None) -> int:
    """Return the exit code; `--help` lists every option."""
    return run_role("decode", run, argv)


if __name__ == "__main__":
    sys.exit(main())
