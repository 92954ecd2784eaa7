"""The benchmark against servers whose truth is known, through real sockets, in simulated time."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import socket
from typing import Any

import pytest

from bench.ladder import Ladder, Plan
from bench.lengths import Lengths
from bench.progress import Progress
from bench.prompts import TokenPrompts
from bench.report import is_failed, table
from bench.workload import Workload

A_MS, B_MS = 40.0, 31.0
SHORT = {"concurrencies": (4,), "num_requests": 4}


def true_rate(concurrency: int) -> float:
    return concurrency / (A_MS + B_MS * concurrency) * 1000


def test_step_law_is_found(stock: dict[str, Any]) -> None:
    assert stock["step_law"]["a_ms"] == pytest.approx(A_MS, rel=0.03)
    assert stock["step_law"]["b_ms"] == pytest.approx(B_MS, rel=0.03)


def test_steady_throughput_is_the_truth(stock: dict[str, Any]) -> None:
    for run in stock["runs"]:
        assert run["steady"]["output_tokens_per_s"] == pytest.approx(true_rate(run["concurrency"]), rel=0.02)


def test_average_over_everything_is_far_from_it(stock: dict[str, Any]) -> None:
    for run in stock["runs"]:
        assert run["average"]["output_tokens_per_s"] < 0.9 * true_rate(run["concurrency"])


def test_interval_of_steady_throughput_holds_the_truth(stock: dict[str, Any]) -> None:
    for run in stock["runs"]:
        low, high = run["steady"]["interval"]
        assert low <= true_rate(run["concurrency"]) * 1.001 and high >= true_rate(run["concurrency"]) * 0.999


def test_earlier_runs_predict_the_next(stock: dict[str, Any]) -> None:
    predicted = stock["runs"][2]["predicted"]
    assert predicted["concurrency"] == 64
    assert predicted["output_tokens_per_s"] == pytest.approx(true_rate(64), rel=0.02)


def test_phases_hold_all_time_and_all_tokens(stock: dict[str, Any]) -> None:
    for run in stock["runs"]:
        assert sum(phase["seconds"] for phase in run["phases"]) == pytest.approx(run["seconds"])
        assert sum(phase["tokens"] for phase in run["phases"]) == pytest.approx(run["tokens"]["output"])


def test_all_answers_are_complete_and_counted_by_token_ids(stock: dict[str, Any]) -> None:
    for run in stock["runs"]:
        assert run["completed"] == run["requests"] and run["failure"] == ""
        assert run["tokens"]["output"] == 50 * run["requests"]
        assert run["tokens"]["counted_by"] == {"token ids": run["requests"]}


def test_report_is_plain_json(stock: dict[str, Any]) -> None:
    assert json.loads(json.dumps(stock, allow_nan=False))["runs"][1]["concurrency"] == 16


def test_a_checkout_that_is_not_installed_gives_a_report(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    report = measure(plan={"concurrencies": (1,), "num_requests": 2})
    assert report["conditions"]["isthmus"] == "not installed" and not is_failed(report)


def test_same_seed_gives_the_same_requests_and_no_run_repeats_a_prompt(measure: Any) -> None:
    first: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    plan = {"concurrencies": (1, 2), "num_requests": 3, "output_len": "2-9"}
    measure(plan=plan, bodies=first)
    measure(plan=plan, bodies=again)
    assert first == again
    prompts = [tuple(body["prompt"]) for body in first]
    assert len(set(prompts)) == len(prompts) >= 6


def test_server_killed_at_64_is_a_failed_line_and_later_runs_have_lines_too(measure: Any) -> None:
    report = measure(kill_at=64, prefill_s=0.1, plan={"concurrencies": (1, 64, 2), "output_len": "30"})
    alone, killed, after = report["runs"]
    assert alone["failure"] == "" and alone["failed"] == 0
    assert killed["failed"] >= 64 and "the server closed the connection" in killed["failure"]
    assert killed["failed"] + killed["completed"] + killed["cancelled"] == killed["requests"]
    assert "can't connect" in after["failure"]
    assert is_failed(report)
    text = table(report)
    assert "C=64 FAILED" in text and "C=2 FAILED" in text


def test_step_law_says_what_the_failed_run_would_have_done(measure: Any) -> None:
    plan = {"concurrencies": (1, 16, 64, 2), "output_len": "30"}
    report = measure(kill_at=64, kill_after_steps=0, prefill_s=0.02, plan=plan)
    assert report["step_law"]["prediction"]["concurrency"] == 64
    assert report["step_law"]["prediction"]["step_ms"] == pytest.approx(A_MS + 64 * B_MS, rel=0.03)


def test_buffered_stream_is_recognised(measure: Any) -> None:
    report = measure(buffers=True, plan=SHORT)
    (run,) = report["runs"]
    assert run["buffered"] and "the stream is buffered" in run["failure"]
    assert run["ttft_ms"]["p50"] is None and run["itl_ms"]["p50"] is None and run["tpot_ms"]["p50"] is None
    assert run["steady"]["output_tokens_per_s"] is None
    assert run["latency_ms"]["p50"] > 0 and run["failed"] == 0
    assert is_failed(report)


def test_groups_of_chunks_are_told_from_a_buffered_stream(measure: Any) -> None:
    (run,) = measure(group=8, plan=SHORT)["runs"]
    assert not run["buffered"] and run["failure"] == ""
    assert any("groups of about 8" in note for note in run["notes"])


def test_short_answer_behind_a_long_prompt_is_not_taken_for_buffered(measure: Any) -> None:
    plan = {"concurrencies": (1,), "num_requests": 2, "output_len": "24"}
    (run,) = measure(a_s=0.002, b_s=0.0, prefill_s=20.0, plan=plan)["runs"]
    assert not run["buffered"]


def test_error_event_is_a_failed_request_with_its_words(measure: Any) -> None:
    (run,) = measure(error_at_token=5, plan=SHORT)["runs"]
    assert run["failed"] == run["requests"] == 4
    assert "error event, after 4 tokens: the engine has failed" in run["failure"]


def test_stream_cut_short_is_a_failed_request(measure: Any) -> None:
    (run,) = measure(ends_early_at=7, plan=SHORT)["runs"]
    assert run["failed"] == 4 and "the server closed the connection" in run["failure"]


def test_stream_that_stalls_fails_after_the_time_given(measure: Any) -> None:
    (run,) = measure(stalls_at=9, plan={**SHORT, "stall_timeout_s": 30.0})["runs"]
    assert run["failed"] == 4 and "nothing came for 30 s, after 8 tokens" in run["failure"]


def test_server_that_only_fails_is_not_asked_for_ever(measure: Any) -> None:
    (run,) = measure(error_at_token=5, plan={"concurrencies": (2,), "num_requests": 500})["runs"]
    assert run["failed"] < 20 and run["failed"] + run["not_sent"] == 500


def test_refused_connections_are_failed_lines(virtual_run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    workload = Workload(Lengths.parse("4"), Lengths.parse("4"), TokenPrompts(), seed=0)

    async def go() -> dict[str, Any]:
        plan = Plan(url=f"http://127.0.0.1:{port}", workload=workload, concurrencies=(1, 2))
        return await Ladder(plan, progress=Progress(quiet=True)).run()

    report = virtual_run(go())
    assert ["does not answer" in run["failure"] for run in report["runs"]] == [True, True]


def test_missing_usage_is_said_and_nothing_fails(measure: Any) -> None:
    (run,) = measure(sends_usage=False, sends_ids=False, plan=SHORT)["runs"]
    assert run["failure"] == "" and run["tokens"]["output"] == 160
    assert list(run["tokens"]["counted_by"]) == ["chunks, since usage is missing: a lower bound"]


def test_missing_done_is_noted(measure: Any) -> None:
    (run,) = measure(sends_done=False, plan=SHORT)["runs"]
    assert run["failure"] == "" and "4 streams ended without data: [DONE]" in run["notes"]


@pytest.mark.parametrize(
    ("refuses", "source"),
    [
        (("return_token_ids",), "usage in every chunk"),
        (("return_token_ids", "continuous_usage_stats", "ignore_eos"), "usage at the end"),
    ],
)
def test_refused_fields_are_left_out_and_named(measure: Any, refuses: tuple[str, ...], source: str) -> None:
    report = measure(refuses=refuses, plan=SHORT)
    assert set(report["conditions"]["refused"]) == set(refuses)
    assert report["runs"][0]["tokens"]["counted_by"] == {source: 4}
    assert report["runs"][0]["tokens"]["output"] == 160


def test_reasoning_counts_as_output_and_is_stated(measure: Any) -> None:
    (run,) = measure(reasons_for=10, plan={**SHORT, "api": "chat"})["runs"]
    assert run["tokens"]["output"] == 160 and run["tokens"]["reasoning"] == 40


def test_server_that_decodes_fewer_than_asked_shows_how_many(measure: Any) -> None:
    (run,) = measure(max_batch=3, prefill_s=0.05, plan={"concurrencies": (6,), "output_len": "60"})["runs"]
    assert run["steady"]["decoding"] == pytest.approx(3)
    assert any("second tokens come late" in note for note in run["notes"])
    assert run["steady"]["output_tokens_per_s"] == pytest.approx(true_rate(3), rel=0.1)


def test_open_loop_has_a_steady_state_below_what_the_server_can_do(measure: Any) -> None:
    plan = {"rates": (1.0,), "num_requests": 120, "output_len": "10"}
    (run,) = measure(a_s=0.02, b_s=0.001, prefill_s=0.05, plan=plan)["runs"]
    assert run["steady"]["problem"] == ""
    assert run["steady"]["output_tokens_per_s"] == pytest.approx(10.0, rel=0.2)


def test_open_loop_above_it_says_that_streams_pile_up(measure: Any) -> None:
    plan = {"rates": (8.0,), "num_requests": 120, "output_len": "20"}
    (run,) = measure(prefill_s=0.05, plan=plan)["runs"]
    assert "the rate is more than the server can do" in run["steady"]["problem"]
    assert run["steady"]["output_tokens_per_s"] is None


def test_run_stopped_by_hand_reports_what_there_was(virtual_run: Any, server_type: Any) -> None:
    async def go() -> dict[str, Any]:
        server = server_type[0](server_type[1](prefill_s=0.1))
        url = await server.start()
        workload = Workload(Lengths.parse("4"), Lengths.parse("200"), TokenPrompts(), seed=0)
        plan = Plan(url=url, workload=workload, concurrencies=(4, 8), warmup=0)
        task = asyncio.ensure_future(Ladder(plan, progress=Progress(quiet=True)).run())
        await asyncio.sleep(10)
        task.cancel()
        try:
            return await task
        finally:
            await server.close()

    report = virtual_run(go())
    stopped, following = report["runs"]
    assert report["interrupted"]
    assert stopped["cancelled"] == 4 and stopped["failed"] == 0 and stopped["tokens"]["output"] > 100
    assert "stopped by hand" in following["failure"]
