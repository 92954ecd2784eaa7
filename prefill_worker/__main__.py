"""`python -m prefill_worker`: a prefill group by hand, without Ray; the leader starts its own ranks."""

from __future__ import annotations

import sys

from engine.by_hand import run_role
from prefill_worker.leader import run


def main(argv: list[str] | None = None) -> int:
    """Return the exit code; `--help` lists every option."""
    return run_role("prefill", run, argv)


if __name__ == "__main__":
    sys.exit(main())
