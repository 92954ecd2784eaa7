"""Groups of two ranks, in processes of their own: any number of ranks on either side gives the golden ids."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = load_file(ROOT / "tests/oracle/tiny/golden.safetensors")
LENGTHS = (1, 64, 129, 300)
EXACT = ("--dtype=float32", "--kv-cache-dtype=fp32", "--max-num-batched-tokens=64", "--max-num-seqs=4")
TWO = ("--ranks=2",)
WORKERS = {
    "prefill-one": (),
    "prefill-two": TWO,
    "prefill-experts": (*TWO, "--expert-parallel=true"),
    "decode-one": (),
    "decode-two": TWO,
}
PAIRS = [
    ("prefill-two", "decode-two"),
    ("prefill-one", "decode-two"),
    ("prefill-two", "decode-one"),
    ("prefill-experts", "decode-two"),
]


class Site:
    """Workers of one, two and two ranks, and a router for each pair that is tried."""

    def __init__(self, folder: Path, model: Path, ports: list[int]) -> None:
        self.folder = folder
        names = [*WORKERS, *map(str, PAIRS)]
        self.ports = dict(zip(names, ports, strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, flags in WORKERS.items():
            role = f"{name.split('-')[0]}_worker"
            self._begin(name, role, f"--model={model}", f"--worker-id={name}", *EXACT, *flags)
        for prefill, decode in PAIRS:
            urls = (f"--prefill={self.url(prefill)}", f"--decode={self.url(decode)}")
            self._begin(str((prefill, decode)), "router", f"--model={model}", *urls)

    def url(self, name: object) -> str:
        return f"http://127.0.0.1:{self.ports[str(name)]}"

    def log(self, name: object) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def info(self, pair: tuple[str, str]) -> dict[str, dict[str, Any]]:
        topology = httpx.get(f"{self.url(pair)}/topology").raise_for_status().json()
        return {worker["id"]: worker for worker in topology["workers"]}

    def await_ready(self, pair: tuple[str, str]) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            assert all(process.poll() is None for process in self.processes.values())
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url(pair)}/ready").status_code == 200:
                    return
            time.sleep(0.05)
        pytest.fail(
            f"{pair} is not ready: {self.log(pair)[-2000:]}{self.log(pair[0])[-2000:]}{self.log(pair[1])[-2000:]}"
        )

    def answer(self, pair: tuple[str, str], length: int) -> list[int]:
        body = {"model": "oracle-tiny", "prompt": GOLDEN[f"prompt_{length}"].tolist(), "max_tokens": 10}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        reply = httpx.post(f"{self.url(pair)}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return ids

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(10)

    def _begin(self, name: str, module: str, *flags: str) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("ISTHMUS_")}
        command = [sys.executable, "-m", module, f"--port={self.ports[name]}", *flags]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT
            )


@pytest.fixture(scope="module")
def site(oracle_model: Path, tmp_path_factory: pytest.TempPathFactory, free_ports) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("ranks"), oracle_model, free_ports(len(WORKERS) + len(PAIRS)))
    yield site
    site.close()


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{prefill}-to-{decode}" for prefill, decode in PAIRS])
def test_tensor_parallel_pairs_give_the_golden_ids(site: Site, pair: tuple[str, str]) -> None:
    site.await_ready(pair)
    wanted = {length: GOLDEN[f"gen_{length}"].tolist() for length in LENGTHS}
    assert {length: site.answer(pair, length) for length in LENGTHS} == wanted


def test_tensor_parallel_ranks_are_shown_with_how_they_exchange(site: Site) -> None:
    site.await_ready(PAIRS[3])
    workers = site.info(PAIRS[3])
    shown = {name: [rank["exchange"] for rank in worker["ranks"]] for name, worker in workers.items()}
    assert {name: len(ranks) for name, ranks in shown.items()} == {"prefill-experts": 2, "decode-two": 2}
    assert {rank["backend"] for ranks in shown.values() for rank in ranks} == {"gloo"}
    assert [rank["experts"] for rank in shown["prefill-experts"]] == ["expert", "expert"]
    assert [rank["experts"] for rank in shown["decode-two"]] == ["inner", "inner"]


def test_a_tensor_parallel_rank_that_is_killed_ends_its_group_and_is_named(site: Site) -> None:
    """Last of the module: its group does not come back, since nobody supervises it."""
    pair = ("prefill-two", "decode-one")
    site.await_ready(pair)
    pid = site.info(pair)["prefill-two"]["ranks"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert site.processes["prefill-two"].wait(20) == 1
    assert f"failed: rank 1 (pid {pid}) ended" in site.log("prefill-two")


# ---------------------------------------------------------------- under Ray


def _faults() -> Any:
    name = "faults"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.long
def test_tensor_parallel_ranks_under_ray_start_again_and_the_request_goes_on(
    launch, oracle_model: Path, tmp_path: Path
) -> None:
    """The second rank of decode is killed between two tokens. Its experts are shared out, prefill's are cut."""
    faults, length = _faults(), 300
    config = faults.write_config(tmp_path, oracle_model, ranks=2)
    config.write_text(config.read_text().replace("decode: [{}]", "decode: [{expert_parallel: true}]"))
    cluster = launch(str(config))
    cluster.await_ready()
    site = faults.Site(cluster)
    before = site.workers()
    assert [len(before[name]["ranks"]) for name in ("prefill-0", "decode-0")] == [2, 2]
    assert before["decode-0"]["ranks"][0]["exchange"]["experts"] == "expert"
    asked, wanted = faults.golden_ask(length, 10), GOLDEN[f"gen_{length}"].tolist()
    site.hold("decode_step", "victim", n=4)

    async def strike() -> Any:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            answer = asyncio.create_task(faults.ask(client, asked.body(stream=True), name="victim"))
            await site.await_held("decode_step", "victim")
            os.kill(before["decode-0"]["ranks"][1]["pid"], signal.SIGKILL)
            return await answer

    answer = asyncio.run(strike())
    assert (answer.token_ids, answer.finish_reason, answer.error) == (wanted, "length", None)
    assert site.workers()["decode-0"]["generation"] != before["decode-0"]["generation"]
    site.await_idle()
