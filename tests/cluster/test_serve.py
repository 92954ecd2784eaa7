"""A cluster serves the oracle's model: exact tokens through prefill, NIXL and decode, and truth about itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.numpy import load_file

from router.protocol import FrameDecoder
from router.sampling import choice_seed

ORACLE = Path(__file__).resolve().parents[1] / "oracle" / "tiny"
LENGTHS = (1, 5, 64, 127, 128, 129, 131, 256, 257, 300, 701)
GOLDEN = load_file(ORACLE / "golden.safetensors")


def body(length: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": "oracle-tiny",
        "prompt": GOLDEN[f"prompt_{length}"].tolist(),
        "max_tokens": len(GOLDEN[f"gen_{length}"]),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }


def ids_of_events(text: str) -> list[int]:
    """Join the token ids of a server-sent stream; it must end in [DONE] and carry no error."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or []]


async def complete(client: httpx.AsyncClient, length: int, *, stream: bool) -> list[int]:
    reply = await client.post("/v1/completions", json=body(length, stream=stream))
    assert reply.status_code == 200, reply.text
    if stream:
        return ids_of_events(reply.text)
    return list(reply.json()["choices"][0]["token_ids"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("length", LENGTHS)
def test_golden_ids_one_at_a_time(cluster, length: int, stream: bool) -> None:
    async def one() -> list[int]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            return await complete(client, length, stream=stream)

    assert asyncio.run(one()) == GOLDEN[f"gen_{length}"].tolist()


def test_golden_ids_all_at_once(cluster) -> None:
    async def everything() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            jobs = [complete(client, length, stream=stream) for length in LENGTHS for stream in (False, True)]
            return await asyncio.gather(*jobs)

    expected = [GOLDEN[f"gen_{length}"].tolist() for length in LENGTHS for _ in (False, True)]
    assert asyncio.run(everything()) == expected


def computed_tokens(cluster) -> int:
    """Return how many prompt tokens the prefill worker has computed, by the next frame of its stream."""
    decoder = FrameDecoder()
    with httpx.stream("GET", f"{cluster.workers()['prefill-0']['url']}/stream?from=0", timeout=10) as stream:
        for data in stream.iter_bytes():
            for frame in decoder.feed(data):
                if frame.stats is not None:
                    return frame.stats.prompt_tokens
    raise AssertionError("the stream ended without a frame")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
def test_three_answers_to_one_prompt_cost_one_prefill_and_are_those_of_their_seeds(cluster, stream: bool) -> None:
    """Each choice goes on at decode from a cache of its own, and samples what it would have sampled alone."""
    asked = {
        "model": "oracle-tiny",
        "prompt": GOLDEN["prompt_300"].tolist(),
        "max_tokens": 12,
        "temperature": 1.2,
        "seed": 7,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    before = computed_tokens(cluster)
    reply = httpx.post(f"{cluster.url}/v1/completions", json=asked | {"n": 3, "stream": stream}, timeout=60)
    assert reply.status_code == 200, reply.text
    answers = [answer_of(reply, index, stream=stream) for index in range(3)]
    assert computed_tokens(cluster) - before == 300
    assert len({tuple(answer) for answer in answers}) == 3
    for index, answer in enumerate(answers):
        alone = httpx.post(f"{cluster.url}/v1/completions", json=asked | {"seed": choice_seed(7, index)}, timeout=60)
        assert alone.json()["choices"][0]["token_ids"] == answer


def answer_of(reply: httpx.Response, index: int, *, stream: bool) -> list[int]:
    """Return the token ids of one choice of an answer."""
    if not stream:
        return [t for choice in reply.json()["choices"] if choice["index"] == index for t in choice["token_ids"]]
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return [token for choice in choices if choice["index"] == index for token in choice.get("token_ids") or []]


def test_first_token_and_those_of_decode_carry_the_log_probabilities_of_the_model(cluster) -> None:
    asked = {
        "model": "oracle-tiny",
        "prompt": GOLDEN["prompt_64"].tolist(),
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 3,
    }
    (choice,) = httpx.post(f"{cluster.url}/v1/completions", json=asked, timeout=60).json()["choices"]
    golden = GOLDEN["gen_64"][:5].tolist()
    assert choice["token_ids"] == golden
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == 5
    for value, top in zip(values, choice["logprobs"]["top_logprobs"], strict=True):
        assert value == max(top.values()) < 0, "a greedy token is the likeliest"


def test_every_leader_and_rank_is_a_process_of_its_own(cluster) -> None:
    workers = cluster.workers()
    pids = [worker["leader_pid"] for worker in workers.values()]
    pids += [rank["pid"] for worker in workers.values() for rank in worker["ranks"]]
    family = {process.pid for process in cluster.family()} - {cluster.process.pid}
    assert len(pids) == len(set(pids)) == 4
    assert set(pids) <= family


def test_leaders_and_ranks_have_the_priority_of_the_command(cluster) -> None:
    workers = cluster.workers().values()
    pids = [pid for worker in workers for pid in (worker["leader_pid"], *(rank["pid"] for rank in worker["ranks"]))]
    assert {psutil.Process(pid).nice() for pid in pids} == {psutil.Process(cluster.process.pid).nice()}


def test_topology_names_the_pair_its_transport_and_its_lane(cluster) -> None:
    (pair,) = cluster.topology()["pairs"]
    assert (pair["prefill"], pair["decode"], pair["state"]) == ("prefill-0", "decode-0", "ready")
    assert pair["transport"] in ("nixl", "host")  # auto takes what this machine allows
    assert min(pair["link"].values()) > 0
    assert pair["lane"] in ("cma", "shm", "sysv", "posix", "xpmem", "knem")


def test_both_sides_show_equal_fingerprints(cluster) -> None:
    prefill, decode = cluster.workers()["prefill-0"], cluster.workers()["decode-0"]
    assert prefill["fingerprints"]["model"] and prefill["fingerprints"] == decode["fingerprints"]


def test_reported_cpus_are_those_of_every_thread(cluster) -> None:
    for worker in cluster.workers().values():
        for rank in worker["ranks"]:
            threads = Path(f"/proc/{rank['pid']}/task").iterdir()
            lines = [line for thread in threads for line in (thread / "status").read_text().splitlines()]
            allowed = {line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:")}
            assert allowed == {rank["numa"]["cpus"]}


def test_numa_status_never_claims_more_than_was_verified(cluster) -> None:
    num_nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    places = [rank["numa"] for worker in cluster.workers().values() for rank in worker["ranks"]]
    assert all(place["evidence"] and place["threads"] > 1 and not place["stray_threads"] for place in places)
    assert all({"fresh", "scratch"} < place["pages"].keys() and all(place["pages"].values()) for place in places)
    if num_nodes == 1:
        assert {place["status"] for place in places} == {"simulated"}
    if (psutil.cpu_count() or 1) > 1:
        assert len({place["cpus"] for place in places}) == 2


def test_nothing_but_loopback_is_listened_on(cluster) -> None:
    listening = [
        connection.laddr.ip
        for process in cluster.family()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.removeprefix("::ffff:") for address in listening} <= {"127.0.0.1", "::1"}


def test_chat_without_a_tokenizer_names_the_missing_file(cluster) -> None:
    message = {"model": "oracle-tiny", "messages": [{"role": "user", "content": "Hello"}]}
    reply = httpx.post(f"{cluster.url}/v1/chat/completions", json=message)
    assert reply.status_code == 501
    assert "tokenizer.json" in reply.json()["error"]["message"]


def test_blocks_and_slots_all_come_back(cluster) -> None:
    asyncio.run(_some_requests(cluster))

    def is_idle() -> bool:
        for worker in cluster.workers().values():
            stats = httpx.get(f"{worker['url']}/info").json()["stats"]
            busy = ("num_running", "num_waiting", "held_blocks", "quarantined_blocks", "open_landings")
            if any(stats.get(name, 0) for name in busy):
                return False
            if stats["free_blocks"] < worker["limits"]["num_blocks"] - 1:
                return False
        return True

    cluster.await_true(is_idle, timeout_s=10)


async def _some_requests(cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        await asyncio.gather(*(complete(client, length, stream=False) for length in (5, 129, 300)))


def test_status_shows_the_cluster(cluster) -> None:
    shown = cluster.run_command("status", "--port", str(cluster.port))
    assert shown.returncode == 0
    words = ("prefill-0", "decode-0", "ready", " over ", "memory of a rank", str(cluster.process.pid))
    assert [word for word in words if word not in shown.stdout] == []


def test_second_cluster_on_the_port_is_refused(cluster) -> None:
    refused = cluster.run_command("up", "--port", str(cluster.port))
    assert refused.returncode == 2
    assert f"port {cluster.port} on 127.0.0.1: taken by another program" in refused.stderr
