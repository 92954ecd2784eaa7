"""Plant each fault of tests/mutants/*.patch in a copy of the tree, run its tests there, and show the one that goes red.

    python tests/mutants/run.py [NAME ...] [--jobs 2]

A patch begins with `# what is wrong`, `# case: ...` and `# tests: ...`, the arguments of the pytest run that must
fail. In the end the tests that failed run once more without any fault: one that is red anyway has shown nothing. Exit
status 1 if a fault survives, a patch does not apply, or a run ends in anything but failed tests.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 180.0
MARKS = "not long and not gpu and not multi_gpu"

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: threads do not survive a fork

# Most of a short run is importing torch: one process has done so, and every run is forked from it. Modules that have
# pytest plugins must not be among these, since pytest wants to be the first to import them.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "safetensors.torch", "msgspec", "pytest"])


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    fault: str
    case: str
    tests: str
    patch: Path


@dataclasses.dataclass(frozen=True)
class Verdict:
    """is_killed: a test failed with the fault. word: the test that failed, or what went wrong."""

    is_killed: bool
    word: str
    seconds: float


def load(patch: Path) -> Mutant:
    """Read a patch's head. Raises ValueError if a line of it is missing."""
    lines = patch.read_text().splitlines()
    head = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    if len(head) != 3 or not head[1].startswith("case: ") or not head[2].startswith("tests: "):
        raise ValueError(f"{patch.name}: must begin with '# what is wrong', '# case: ...' and '# tests: ...'")
    return Mutant(patch.stem, head[0], head[1].removeprefix("case: "), head[2].removeprefix("tests: "), patch)


def all_mutants() -> list[Mutant]:
    return [load(patch) for patch in sorted(HERE.glob("*.patch"))]


def apply(patch: Path, tree: Path, *, check: bool = False) -> str:
    """Apply a patch to a tree, or only see whether it would; returns git's complaint, "" if there is none."""
    words = ["git", "apply", *(["--check"] if check else []), str(patch)]
    # Outside any repository git applies to the folder it stands in, whatever that belongs to.
    done = subprocess.run(words, cwd=tree, env={**os.environ, "GIT_DIR": os.devnull}, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"git apply ended with {done.returncode}")


def copy_tree(target: Path) -> None:
    """Copy what git knows, or would if it were added."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def _in_child(arguments: list[str], tree: Path, output: Path) -> None:
    """Run pytest in this process, which has been forked for it, and end with pytest's status."""
    sink = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "COLUMNS": "1000"}
    sys.path[0] = str(tree)
    status = pytest.main(["-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *arguments, "-m", MARKS])
    sys.stdout.flush()
    os._exit(int(status))


def pytest_run(arguments: list[str], tree: Path, *, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Return pytest's status (-1: out of time) and what it printed."""
    output = tree / "pytest-output.txt"
    process = _processes.Process(target=_in_child, args=(arguments, tree, output))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        return -1, f"not done after {timeout_s:.0f} s"
    return process.exitcode or 0, output.read_text(errors="replace") if output.exists() else ""


def failed_tests(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)


def try_mutant(mutant: Mutant) -> Verdict:
    started = time.monotonic()

    def verdict(is_killed: bool, word: str) -> Verdict:
        return Verdict(is_killed, word, time.monotonic() - started)

    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        if complaint := apply(mutant.patch, tree):
            return verdict(False, f"the patch does not apply: {complaint}")
        status, output = pytest_run(["-x", *shlex.split(mutant.tests)], tree)
        if status == 0:
            return verdict(False, "SURVIVED")
        red = failed_tests(output)
        if status != 1 or not red:
            return verdict(False, f"no verdict (status {status}): {output.strip()[-300:]}")
        return verdict(True, red[0])


def red_without_fault(tests: list[str]) -> list[str]:
    """Return those of `tests` that fail in the tree as it is."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_tree(Path(folder))
        # All of them in one process: most of a short run is importing torch.
        status, output = pytest_run([*tests, "--maxfail=1000"], Path(folder), timeout_s=2 * TIMEOUT_S)
    red = failed_tests(output)
    return red if status in (0, 1) else [*red, f"no verdict (status {status}): {output.strip()[-300:]}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these patches, without .patch")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    chosen = parser.parse_args()
    mutants = [m for m in all_mutants() if not chosen.names or m.name in chosen.names]
    if unknown := set(chosen.names) - {m.name for m in mutants}:
        parser.error(f"no such patch: {', '.join(sorted(unknown))}")
    started, red = time.monotonic(), []
    width = max(len(m.name) for m in mutants)
    with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
        for mutant, verdict in zip(mutants, pool.map(try_mutant, mutants), strict=True):
            red += [verdict.word] if verdict.is_killed else []
            mark = "killed" if verdict.is_killed else "ALIVE "
            print(f"{mutant.name:<{width}}  {mark} {verdict.seconds:5.1f} s  {verdict.word}", flush=True)
    void = red_without_fault(sorted(set(red))) if red else []
    for test in void:
        print(f"red without any fault: {test}")
    num_killed = len([test for test in red if test not in void])
    print(f"{num_killed} of {len(mutants)} killed in {time.monotonic() - started:.0f} s")
    return 0 if num_killed == len(mutants) and not void else 1


if __name__ == "__main__":
    sys.exit(main())
