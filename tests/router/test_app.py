"""The routes: health, models, topology, metrics, error objects, headers."""

from __future__ import annotations

import json

import httpx
import msgspec
import pytest

from router.protocol import PROTOCOL_VERSION, MemoryPart, MemorySummary, WorkerInfo
from router.workers import Worker


def test_ready_cluster_lists_its_model(cluster):
    models = cluster.http.get("/v1/models").json()
    assert [m["id"] for m in models["data"]] == ["dsv4-tiny"]
    assert models["data"][0]["max_model_len"] == 4096


def test_one_model_is_found_by_name_and_others_are_not(cluster):
    assert cluster.http.get("/v1/models/dsv4-tiny").json()["object"] == "model"
    answer = cluster.http.get("/v1/models/some/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/health", "/live", "/liveness", "/ready", "/readiness", "/version"])
def test_health_routes_say_yes_when_ready(cluster, path):
    assert cluster.http.get(path).status_code == 200


def test_topology_shows_pairs_workers_and_ranks(cluster):
    topology = cluster.http.get("/topology").json()
    assert topology["pairs"] == [
        {
            "prefill": f"prefill-{cluster.prefills[0].port}",
            "decode": f"decode-{cluster.decodes[0].port}",
            "state": "ready",
            "transport": "local",
            "lane": "memcpy",
            "link": {"warmup_us": 0.0, "latency_us": 0.0, "gb_per_s": 0.0, "copy_gb_per_s": 0.0},
            "staging_pages": {},
            "reason": "",
        }
    ]
    worker = topology["workers"][1]
    assert (worker["role"], worker["state"], worker["leader_pid"]) == ("decode", "ready", 4711)
    assert worker["generation"] == cluster.decodes[0].generation
    numa = {"status": "simulated", "node": 0, "cpus": "0-1", "evidence": ""}
    numa |= {"threads": 0, "stray_threads": 0, "pages": {}, "warnings": []}
    assert worker["ranks"][0]["numa"] == numa
    assert worker["fingerprints"] == {"model": "model-1", "layout": "layout-1", "protocol": PROTOCOL_VERSION}
    assert topology["router"]["state"] == "ready"


def test_topology_shows_what_a_worker_s_memory_goes_to():
    memory = MemorySummary(
        device_bytes=9, parts=[MemoryPart(name="weights", num_bytes=4)], left_bytes=5, cache_tokens=0, max_num_seqs=2,
        max_model_len=8, context_at_full_batch=4, context_that_fits=6, longest_context=8, largest_batch=1,
        graph_sizes=[1, 2], graph_nodes={1: 600, 2: 610},
    )  # fmt: skip
    worker = Worker("http://w", "decode")
    about = {"id": "d", "role": "decode", "url": "http://w", "state": "ready", "generation": 1, "leader_pid": 2}
    worker.info = WorkerInfo(**about, memory=memory)
    shown = json.loads(msgspec.json.encode(worker.describe()))["memory"]
    assert shown["parts"] == [{"name": "weights", "num_bytes": 4, "how": "", "planned_bytes": 0}]
    assert (shown["left_bytes"], shown["graph_nodes"]) == (5, {"1": 600, "2": 610})


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nowhere", 404, "route_not_found"), ("GET", "/v1/completions", 405, "method_not_allowed")],
)
def test_what_the_framework_refuses_is_an_error_object_too(cluster, method, path, status, code):
    answer = cluster.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_path_without_its_version_gets_the_right_one_suggested(cluster):
    assert cluster.http.post("/chat/completions").json()["error"]["message"] == (
        "/chat/completions: no such route; did you mean /v1/chat/completions?"
    )


def test_wrong_method_is_told_the_right_one(cluster):
    assert cluster.http.get("/v1/completions").json()["error"]["message"] == "GET is not allowed here; use POST"


@pytest.mark.parametrize(
    ("method", "path", "word"),
    [
        ("POST", "/v1/embeddings", "embeddings"),
        ("POST", "/v1/responses", "responses"),
        ("GET", "/v1/responses/resp_1", "responses"),
        ("POST", "/v1/images/generations", "images"),
        ("POST", "/v1/audio/transcriptions", "audio"),
        ("POST", "/v1/moderations", "moderation"),
        ("POST", "/v1/rerank", "reranking"),
        ("DELETE", "/v1/files/file-1", "files"),
        ("POST", "/v1/messages", "messages"),
    ],
)
def test_routes_that_others_have_are_refused_by_name(cluster, method, path, word):
    answer = cluster.http.request(method, path, content=b"anything")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], answer.headers["x-should-retry"]) == (501, "unsupported_route", "false")
    assert word in error["message"]
    assert "/v1/chat/completions" in error["message"]


def test_a_refused_upload_leaves_the_connection_usable(cluster):
    assert cluster.http.post("/v1/audio/transcriptions", content=b"x" * (4 << 20)).status_code == 501
    assert cluster.http.get("/live").status_code == 200


def test_health_can_be_had_by_making_tokens(cluster):
    reserves = len(cluster.decodes[0].calls)
    answer = cluster.http.get("/health_generate")
    assert (answer.status_code, answer.json()["num_tokens"]) == (200, 2)
    assert len(cluster.decodes[0].calls) > reserves
    cluster.assert_clean()


def test_health_by_tokens_fails_when_no_pair_can_make_any(make_cluster):
    with make_cluster(waits_ready=False) as cluster:
        cluster.call(lambda: cluster.decodes[0].set_state("loading"))
        cluster.wait(lambda: cluster.router.registry.workers[1].state == "loading")
        answer = cluster.http.get("/health_generate")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1


def test_server_info_tells_limits_and_configuration(cluster):
    info = cluster.http.get("/server_info").json()
    assert (info["model"], info["max_model_len"], info["vocab_size"]) == ("dsv4-tiny", 4096, 129280)
    assert info["config"]["max_queue"] == 1024
    assert info["config"]["decode"] == [cluster.decodes[0].url]


def test_answers_tell_how_long_they_took(cluster):
    for answer in (cluster.http.get("/live"), cluster.http.get("/nowhere"), cluster.post("/v1/completions", b"{}")):
        assert 0 <= int(answer.headers["openai-processing-ms"]) < 10_000
        assert answer.headers.get_list("x-request-id") == [answer.headers["x-request-id"]]


def test_request_id_is_cleaned_and_echoed(cluster):
    body = {"model": "dsv4-tiny", "prompt": [5, 6], "max_tokens": 1}
    answer = cluster.post("/v1/completions", body)
    assert answer.headers["x-request-id"].startswith("req-")
    answer = cluster.http.post("/v1/completions", json=body, headers={"x-request-id": "my id<1>"})
    assert answer.headers["x-request-id"] == "myid1"


def test_metrics_count_outcomes_and_tokens(make_cluster):
    with make_cluster() as cluster:
        for n in (1, 3):
            cluster.post("/v1/completions", {"prompt": [5, 6], "max_tokens": n, "ignore_eos": True})
        cluster.post("/v1/completions", {"prompt": []})
        cluster.assert_clean()
        text = cluster.http.get("/metrics").text
    for line in (
        "isthmus_requests_received_total 3.0",
        'isthmus_requests_total{outcome="length"} 2.0',
        'isthmus_requests_total{outcome="rejected"} 1.0',
        'isthmus_rejections_total{status="400"} 1.0',
        "isthmus_prompt_tokens_total 4.0",
        "isthmus_generation_tokens_total 4.0",
        "isthmus_time_to_first_token_seconds_count 2.0",
        "isthmus_num_requests_running 0.0",
        "isthmus_ready 1.0",
    ):
        assert line in text.splitlines()


def test_token_totals_count_aborted_requests_by_one_rule(make_cluster):
    with make_cluster() as cluster:
        held = cluster.hold("step_gate")
        with cluster.http.stream(
            "POST", "/v1/completions", json={"prompt": [5, 6], "max_tokens": 9, "stream": True}
        ) as r:
            next(r.iter_lines())
        cluster.wait(lambda: not cluster.router.dispatcher.records)
        cluster.let_go(held)
        cluster.assert_clean()
        lines = cluster.http.get("/metrics").text.splitlines()
    assert 'isthmus_requests_total{outcome="aborted"} 1.0' in lines
    assert "isthmus_prompt_tokens_total 2.0" in lines
    assert "isthmus_generation_tokens_total 1.0" in lines


def test_series_do_not_grow_with_what_clients_choose(cluster):
    def series():
        return {line.rsplit(" ", 1)[0] for line in cluster.http.get("/metrics").text.splitlines()}

    before = series()  # the first refusal is an increase of a series that is there
    for n in range(10):
        cluster.http.post("/v1/completions", json={"model": f"m{n}", "prompt": [5]}, headers={"x-request-id": str(n)})
    assert series() == before


def test_before_a_pair_is_ready_the_router_says_so(make_cluster):
    with make_cluster(waits_ready=False) as cluster:
        cluster.call(lambda: cluster.decodes[0].set_state("loading"))
        cluster.wait(lambda: cluster.router.registry.workers[1].state == "loading")
        assert cluster.http.get("/live").status_code == 200
        ready = cluster.http.get("/ready")
        assert ready.status_code == 503
        assert int(ready.headers["retry-after"]) >= 1
        assert ready.json()["error"]["code"] == "waiting"
        assert cluster.http.get("/v1/models").json()["data"] == []
        answer = cluster.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2}, timeout=5)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        cluster.call(lambda: cluster.decodes[0].set_state("ready"))
        cluster.wait(lambda: cluster.router.registry.is_ready)
        assert cluster.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2}).status_code == 200


def test_garbage_instead_of_http_is_no_traceback(cluster, caplog):
    with httpx.Client(base_url=cluster.url, trust_env=False) as client:
        answer = client.post("/v1/completions", content=b"\x00\xff" * 100)
    assert answer.status_code == 400
    assert not [r for r in caplog.records if r.exc_info]
