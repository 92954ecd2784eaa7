"""Workers that come, go, restart, fall silent or don't fit."""

from __future__ import annotations

import concurrent.futures
import json

import httpx

from router import protocol

BODY = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True}


def works(cluster) -> bool:
    return cluster.post("/v1/completions", BODY).status_code == 200


def test_warm_up_is_a_whole_request_through_the_pair(make_cluster):
    with make_cluster(waits_ready=False) as cluster:
        cluster.wait(lambda: cluster.router.registry.is_ready)
        paths = [path for path, _ in cluster.prefills[0].calls]
        assert paths[:2] == ["/link", "/prefill"]
        link = cluster.prefills[0].calls[0][1]
        assert (link.endpoints, link.generation) == ([b"endpoint"], cluster.decodes[0].generation)
        canary = cluster.prefills[0].calls[1][1]
        assert canary.sampling.max_tokens == 2
        # more than a block, so that every group of the cache has rows, and compared where it lands
        assert len(canary.prompt_token_ids) == cluster.router.registry.limits().block_tokens + 1
        assert canary.checksum
        cluster.assert_clean()


def test_a_pair_that_does_not_warm_up_is_not_ready(make_cluster):
    with make_cluster(waits_ready=False, reserve_timeout_s=0.2, transfer_timeout_s=0.2) as cluster:
        cluster.call(lambda: setattr(cluster, "transfers_work", False))
        cluster.wait(lambda: cluster.router.registry.pairs[0].reason)
        assert not cluster.router.registry.is_ready
        assert "transfer took longer" in cluster.http.get("/ready").json()["error"]["message"]
        cluster.call(lambda: setattr(cluster, "transfers_work", True))
        cluster.wait(lambda: cluster.router.registry.is_ready)


def test_a_restarted_decode_worker_is_linked_again(make_cluster):
    with make_cluster() as cluster:
        old = cluster.decodes[0]
        cluster.call(old.kill)

        async def restart():
            cluster.decodes[0] = type(old)(cluster, old.port)
            await cluster.decodes[0].start()

        cluster.call(restart)
        registry = cluster.router.registry
        cluster.wait(lambda: registry.is_ready and registry.decodes[0].generation == cluster.decodes[0].generation)
        links = [m for path, m in cluster.prefills[0].calls if path == "/link"]
        assert [m.generation for m in links] == [old.generation, cluster.decodes[0].generation]
        cluster.wait(lambda: "/unlink" in [path for path, _ in cluster.prefills[0].calls])
        assert works(cluster)
        cluster.assert_clean()


def test_a_cut_stream_is_taken_up_where_it_broke(make_cluster):
    with make_cluster() as cluster:
        cluster.call(lambda: setattr(cluster, "step_s", 0.005))
        answer = cluster.post("/v1/completions", BODY | {"max_tokens": 60, "return_token_ids": True})
        whole = answer.json()["choices"][0]["token_ids"]
        fields = BODY | {"max_tokens": 60, "stream": True, "return_token_ids": True}
        with cluster.http.stream("POST", "/v1/completions", json=fields) as stream:
            got: list[int] = []
            for n, line in enumerate(line for line in stream.iter_lines() if line.startswith("data: {")):
                got += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                if n == 5:
                    cluster.call(cluster.decodes[0].cut_connections)
        assert got == whole
        assert len([path for path, _ in cluster.prefills[0].calls if path == "/link"]) == 1
        cluster.assert_clean()


def test_a_mute_worker_is_not_ready_and_not_declared_dead(make_cluster):
    with make_cluster(worker_silence_s=0.6) as cluster:
        cluster.call(lambda: setattr(cluster.prefills[0], "is_mute", True))
        cluster.wait(lambda: not cluster.router.registry.is_ready, timeout_s=5)
        cluster.wait(lambda: cluster.router.registry.prefills[0].is_lost, timeout_s=5)
        assert "/writer_lost" not in [path for path, _ in cluster.decodes[0].calls]
        assert cluster.http.get("/live").status_code == 200
        cluster.call(lambda: setattr(cluster.prefills[0], "is_mute", False))
        cluster.call(lambda: cluster.prefills[0].publish([]))
        cluster.wait(lambda: cluster.router.registry.is_ready, timeout_s=10)
        assert works(cluster)


def test_a_worker_that_was_out_of_reach_hears_of_requests_that_ended_meanwhile(make_cluster):
    with make_cluster(worker_silence_s=0.6) as cluster:
        steps = cluster.hold("step_gate")
        decode = cluster.router.registry.decodes[0]
        fields = BODY | {"stream": True}
        with cluster.http.stream("POST", "/v1/completions", json=fields, timeout=20) as stream:
            cluster.wait(lambda: steps.reached)
            cluster.call(lambda: setattr(cluster.decodes[0], "is_mute", True))
            cluster.wait(lambda: decode.is_lost)
            assert '"error"' in stream.read().decode()
        left = set(cluster.decodes[0].running)
        assert left
        cluster.call(lambda: setattr(cluster.decodes[0], "is_mute", False))
        cluster.call(lambda: cluster.decodes[0].publish([]))
        cluster.wait(lambda: not left & set(cluster.decodes[0].running))  # though it has not taken another step
        cluster.let_go(steps)
        cluster.assert_clean()


def test_workers_that_differ_are_refused_with_both_values(make_cluster):
    with make_cluster(num_decodes=2) as cluster:
        registry = cluster.router.registry
        cluster.wait(lambda: len(registry.ready_pairs()) == 2)
        other = protocol.Fingerprints(model="model-1", layout="layout-2")
        cluster.call(lambda: setattr(cluster.decodes[1], "fingerprints", other))
        cluster.call(lambda: cluster.decodes[1].set_state("warming"))
        cluster.call(lambda: cluster.decodes[1].set_state("ready"))
        cluster.wait(lambda: registry.pairs[1].state == "failed")
        pairs = cluster.http.get("/topology").json()["pairs"]
        assert [p["state"] for p in pairs] == ["ready", "failed"]
        assert "layout-1" in pairs[1]["reason"]
        assert "layout-2" in pairs[1]["reason"]
        assert works(cluster)


def test_a_worker_of_the_wrong_role_or_protocol_is_refused(make_cluster):
    future = protocol.Fingerprints(model="model-1", layout="layout-1", protocol=99)
    for change, text in (
        (lambda w: setattr(w, "served_role", "prefill"), "was given as --decode"),
        (lambda w: setattr(w, "fingerprints", future), "speaks protocol 99, this router 2"),
    ):
        with make_cluster(num_decodes=2) as cluster:
            registry = cluster.router.registry
            cluster.wait(lambda registry=registry: len(registry.ready_pairs()) == 2)
            cluster.call(lambda cluster=cluster, change=change: change(cluster.decodes[1]))
            cluster.call(lambda cluster=cluster: cluster.decodes[1].set_state("warming"))
            cluster.wait(lambda registry=registry: registry.decodes[1].is_refused)
            worker = cluster.http.get("/topology").json()["workers"][2]
            assert worker["state"] == "failed"
            assert text in worker["reason"]


def test_a_worker_that_waits_for_a_cache_is_ready_and_chosen(make_cluster):
    with make_cluster() as cluster:
        cluster.call(lambda: setattr(cluster, "transfers_work", False))
        with cluster.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}, timeout=20) as stream:
            lines = stream.iter_lines()
            next(lines)  # the token of prefill
            cluster.wait(lambda: cluster.router.registry.decodes[0].stats.open_landings)
            cluster.call(lambda: setattr(cluster, "transfers_work", True))
            assert cluster.http.get("/ready").status_code == 200
            assert works(cluster)
            lines.close()
        cluster.assert_clean()


def test_a_draining_worker_gets_nothing_new(make_cluster):
    with make_cluster(num_decodes=2) as cluster:
        cluster.wait(lambda: len(cluster.router.registry.ready_pairs()) == 2)
        cluster.call(lambda: cluster.decodes[0].set_state("draining"))
        cluster.wait(lambda: len(cluster.router.registry.ready_pairs()) == 1)
        reserved = len([path for path, _ in cluster.decodes[0].calls if path == "/reserve"])
        assert all(works(cluster) for _ in range(3))
        assert len([path for path, _ in cluster.decodes[0].calls if path == "/reserve"]) == reserved


def test_a_prefill_worker_that_was_wrongly_declared_dead_is_asked_to_end(make_cluster):
    with make_cluster() as cluster:
        old = cluster.prefills[0]

        async def begin(generation=None):
            cluster.prefills[0] = type(old)(cluster, old.port)
            cluster.prefills[0].generation = generation or cluster.prefills[0].generation
            await cluster.prefills[0].start()

        cluster.call(old.kill)  # as a link that refuses: the same life answers again later
        cluster.wait(lambda: "/writer_lost" in [path for path, _ in cluster.decodes[0].calls])
        cluster.call(lambda: begin(old.generation))
        cluster.wait(lambda: "/drain" in [path for path, _ in cluster.prefills[0].calls])
        assert "start it again" in cluster.http.get("/ready").json()["error"]["message"]
        assert [path for path, _ in cluster.prefills[0].calls] == ["/drain"]
        cluster.call(cluster.prefills[0].kill)
        cluster.call(begin)
        cluster.wait(lambda: cluster.router.registry.is_ready)
        assert works(cluster)


def test_a_decode_worker_that_was_wrongly_declared_dead_serves_again_and_may_die_again(make_cluster):
    with make_cluster() as cluster:
        old = cluster.decodes[0]

        async def begin():
            cluster.decodes[0] = type(old)(cluster, old.port)
            cluster.decodes[0].generation, cluster.decodes[0].frames = old.generation, old.frames
            await cluster.decodes[0].start()

        def deaths():
            return [lost.generation for path, lost in cluster.prefills[0].calls if path == "/unlink"]

        for times in (1, 2):
            cluster.call(cluster.decodes[0].kill)
            cluster.wait(lambda times=times: deaths() == [old.generation] * times)
            cluster.call(begin)
            cluster.wait(lambda: cluster.router.registry.is_ready)
            assert works(cluster)


# ---------------------------------------------------------------- joining, draining, leaving


def control(cluster, path: str, body: dict | None = None, *, status: int = 200):
    """Call a control route of the cluster's router."""

    async def ask():
        transport = httpx.ASGITransport(cluster.router.control_app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    reply = cluster.call(ask)
    assert reply.status_code == status, reply.text
    return reply.json()


def add_decode(cluster) -> tuple:
    """Let one more decode worker join; return the fake and the registry's entry, ready."""

    async def start():
        cluster.decodes.append(type(cluster.decodes[0])(cluster))
        await cluster.decodes[-1].start()

    cluster.call(start)
    fake = cluster.decodes[-1]
    control(cluster, "/workers", {"role": "decode", "url": fake.url}, status=201)
    registry = cluster.router.registry
    cluster.wait(lambda: any(pair.decode.url == fake.url and pair.state == "ready" for pair in registry.pairs))
    return fake, registry.find(fake.url)


def reserved(fake) -> int:
    return len([m for path, m in fake.calls if path == "/reserve" and not m.request_id.startswith("warm-")])


def test_a_worker_that_joins_is_warmed_up_and_shares_the_load(make_cluster):
    with make_cluster() as cluster:
        fake, _ = add_decode(cluster)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            steps = cluster.hold("step_gate")
            answers = [pool.submit(works, cluster) for _ in range(8)]
            cluster.wait(lambda: len(cluster.decodes[0].running) + len(fake.running) == 8)
            assert len(fake.running) == 4
            cluster.let_go(steps)
            assert all(answer.result(20) for answer in answers)
        assert {w["role"]: w["num_requests"] for w in control(cluster, "/workers")} == {"prefill": 0, "decode": 0}
        cluster.assert_clean()


def test_a_drained_worker_gets_nothing_new_and_finishes_what_it_has(make_cluster):
    with make_cluster() as cluster:
        fake, worker = add_decode(cluster)
        steps = cluster.hold("step_gate")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            first = [pool.submit(works, cluster) for _ in range(2)]
            cluster.wait(lambda: len(fake.running) == 1)
            entry = control(cluster, "/workers/drain", {"url": fake.url})
            assert (entry["state"], entry["num_requests"]) == ("draining", 1)
            then = [pool.submit(works, cluster) for _ in range(2)]
            cluster.wait(lambda: len(cluster.decodes[0].running) == 3)
            assert reserved(fake) == 1
            cluster.let_go(steps)
            assert all(answer.result(20) for answer in [*first, *then])
        cluster.wait(lambda: worker.num_requests == 0)
        control(cluster, "/workers/remove", {"url": fake.url})
        assert [w["url"] for w in control(cluster, "/workers")] == [cluster.prefills[0].url, cluster.decodes[0].url]
        assert cluster.router.dispatcher._metrics.retries.labels("worker_lost")._value.get() == 0
        assert works(cluster)
        cluster.assert_clean()


def test_what_runs_at_a_worker_that_is_removed_goes_on_elsewhere_with_the_same_tokens(make_cluster, next_tokens):
    with make_cluster() as cluster:
        fake, _ = add_decode(cluster)
        cluster.call(lambda: setattr(cluster, "step_s", 0.02))
        fields = BODY | {"max_tokens": 40, "return_token_ids": True}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(cluster.post, "/v1/completions", fields) for _ in range(2)]
            cluster.wait(lambda: any(len(landed.outputs) > 3 for landed in fake.running.values()))
            left = list(fake.running.values())
            control(cluster, "/workers/drain", {"url": fake.url})
            control(cluster, "/workers/remove", {"url": fake.url})
            whole: list[int] = []
            while len(whole) < 40:
                whole.append(next_tokens(BODY["prompt"] + whole))
            assert [answer.result(20).json()["choices"][0]["token_ids"] for answer in answers] == [whole, whole]
        cluster.wait(lambda: not fake.running)
        assert all(len(landed.outputs) < 40 for landed in left)  # it was told, and computes for nobody
        cluster.assert_clean()


def test_control_refuses_what_can_not_be(make_cluster):
    with make_cluster() as cluster:
        url = cluster.decodes[0].url
        assert "already" in control(cluster, "/workers", {"role": "decode", "url": url}, status=409)["error"]
        assert "no URL" in control(cluster, "/workers", {"role": "decode", "url": "10.0.0.1:1"}, status=400)["error"]
        assert "role" in control(cluster, "/workers", {"role": "router", "url": "http://a"}, status=400)["error"]
        assert url in control(cluster, "/workers/drain", {"url": "http://nobody"}, status=404)["error"]
        assert cluster.http.get("/workers").status_code == 404  # not on the port of the API
