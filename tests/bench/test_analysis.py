"""What is made of streams: phases, rates, step law, goodput, comparison, page; on streams written by hand."""

from __future__ import annotations

import copy
import html.parser
import math
import random
import re
from typing import Any

import numpy as np
import pytest

from bench.compare import compare, read_report, table
from bench.grouping import find_grouping
from bench.html import page
from bench.phases import Occupancy, find_phases
from bench.plot import Axis
from bench.slo import Slo
from bench.statistics import Production, bootstrap, interval, percentiles, rate_of
from bench.step_law import Experts, Point, StepLaw
from bench.stream import Outcome, Stream, TokenSource


def stream(times: list[float], *, sent: float = 0.0, counts: list[int] | None = None, ok: bool = True) -> Stream:
    made = Stream(0, 8, len(times), due=sent, sent=sent, ended=times[-1] if times else sent)
    made.times, made.counts = times, counts or [1] * len(times)
    made.outcome = Outcome.OK if ok else Outcome.FAILED
    return made


def steps(first: float, count: int, step: float = 0.1) -> list[float]:
    return [first + at * step for at in range(count)]


# ------------------------------------------------------------ phases


def test_steady_state_begins_a_step_behind_the_last_first_token_and_ends_with_the_first_end() -> None:
    streams = [stream(steps(1.0 + at, 60)) for at in range(4)]
    phases = find_phases(streams, concurrency=4)
    ((begin, end),) = phases.steady
    assert begin == pytest.approx(4.1) and end == pytest.approx(6.9)
    assert phases.level == 4 and phases.end == pytest.approx(9.9)


def test_one_straggler_does_not_hide_the_steady_state_of_the_others() -> None:
    streams = [stream(steps(1.0, 100)) for _ in range(15)] + [stream(steps(10.8, 20))]
    phases = find_phases(streams, concurrency=16)
    assert phases.level == 15
    assert phases.steady_s == pytest.approx(9.8, abs=0.2)


def test_stream_that_stalls_for_long_does_not_cut_the_window() -> None:
    stalled = stream([*steps(1.0, 5), *steps(8.0, 20)])
    streams = [stream(steps(1.0, 90)) for _ in range(31)] + [stalled]
    assert find_phases(streams, concurrency=32).steady_s == pytest.approx(8.8, abs=0.2)


def test_ramp_is_no_steady_state_at_a_lower_number() -> None:
    streams = [stream([*steps(float(at), 5 * (40 - at), 0.2)]) for at in range(40)]
    assert find_phases(streams, concurrency=80).level >= 24


def test_ramp_that_ends_in_a_crash_has_none() -> None:
    streams = [stream([*steps(float(at), max(2, (40 - at) // 2), 2.0)]) for at in range(40)]
    assert find_phases(streams, concurrency=64).steady == ()


def test_run_of_few_steps_has_no_steady_state_and_says_so() -> None:
    phases = find_phases([stream(steps(1.0, 6)) for _ in range(4)], concurrency=4)
    assert phases.steady == () and "fewer than 16 steps" in phases.problem


def test_run_without_streams_has_no_phases() -> None:
    assert find_phases([], concurrency=4).steady == ()


def test_occupancy_counts_as_a_loop_would() -> None:
    rng = random.Random(3)
    spans = [(begin := rng.uniform(0, 10), begin + rng.uniform(0, 5)) for _ in range(50)]
    occupancy = Occupancy(*zip(*spans, strict=True))
    for moment in np.linspace(-1, 16, 200):
        assert occupancy.at(float(moment)) == sum(begin <= moment < end for begin, end in spans)
    for begin, end in occupancy.windows(10):
        assert occupancy.at((begin + end) / 2) >= 10


# ------------------------------------------------------------ rates and intervals


def test_window_holds_its_part_wherever_its_edges_fall() -> None:
    production = Production([stream(steps(1.0, 50)) for _ in range(3)])
    for begin in (2.0, 2.03, 2.07):
        assert production.tokens(begin, begin + 1.234) == pytest.approx(3 * 12.34)


def test_first_chunk_counts_at_its_moment() -> None:
    production = Production([stream([5.0, 6.0], counts=[2, 4])])
    assert production.tokens(0, 4.99) == 0
    assert production.tokens(4.99, 5.0) == 2
    assert production.tokens(5.0, 5.5) == pytest.approx(2)


def test_chunks_read_at_one_moment_are_not_lost() -> None:
    production = Production([stream([1.0, 1.0, 2.0, 2.0, 2.0])])
    assert production.tokens(0.0, 1.0) == 2
    assert production.tokens(0.0, 2.0) == 5


def test_percentiles_leave_out_what_never_came() -> None:
    assert percentiles([1.0, math.nan, 3.0])["p50"] == 2.0
    assert percentiles([]) == {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None}


def test_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        rows = np.stack([rng.normal(100, 10, 40), np.ones(40)], axis=1)
        bounds = interval(bootstrap([rows], rate_of, num_resamples=200))
        assert bounds is not None
        held += bounds[0] <= 100 <= bounds[1]
    assert 85 <= held <= 99


def test_runs_that_vary_widen_the_interval() -> None:
    rows = [np.stack([np.full(30, rate), np.ones(30)], axis=1) for rate in (90.0, 100.0, 110.0)]
    together, apart = interval(bootstrap([np.concatenate(rows)], rate_of)), interval(bootstrap(rows, rate_of))
    assert together is not None and apart is not None
    assert apart[1] - apart[0] > 2 * (together[1] - together[0])


# ------------------------------------------------------------ step law


def law_of(step_ms: Any, numbers: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> StepLaw:
    return StepLaw([Point(n, step_ms(n) / 1000, 50) for n in numbers], experts=Experts())


def test_step_of_a_mixture_of_experts_is_told_from_a_line() -> None:
    def truth(n: float) -> float:
        return 2.0 + 0.05 * 256 * (1 - (1 - 6 / 256) ** n) + 0.01 * n

    law = law_of(truth)
    assert law.expert_form is not None and law.better is law.expert_form
    assert law.expert_form.terms["c"] * 1000 == pytest.approx(0.05, rel=0.01)
    assert law.predict(128)["step_ms"] == pytest.approx(truth(128), rel=0.01)
    assert "a + c U(N) + d N holds better" in law.verdict


def test_line_stays_a_line() -> None:
    law = law_of(lambda n: 40 + 31 * n)
    assert law.line.terms["a"] == pytest.approx(0.040) and law.line.terms["b"] == pytest.approx(0.031)
    assert law.predict(128)["step_ms"] == pytest.approx(4008)


def test_no_term_is_negative() -> None:
    law = law_of(lambda n: 10.0 - 0.01 * n)
    assert law.line.terms["b"] == 0.0


def test_numbers_too_near_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="two numbers far apart"):
        law_of(lambda n: 40 + 31 * n, (63, 64))


# ------------------------------------------------------------ groups, goodput, counting


def test_chunks_that_all_come_at_the_end_are_buffered() -> None:
    ends = [stream([9.0 + at * 1e-5 for at in range(100)]) for _ in range(4)]
    assert find_grouping(ends).is_buffered
    assert not find_grouping([stream(steps(1.0, 100)) for _ in range(4)]).is_buffered


def test_whole_answer_in_one_chunk_is_buffered() -> None:
    assert find_grouping([stream([5.0], counts=[64])]).is_buffered


def test_goodput_counts_streams_that_keep_all_bounds_and_no_failed_one() -> None:
    fast, slow = stream(steps(0.5, 10, 0.02)), stream(steps(3.0, 10, 0.02))
    failed = stream(steps(0.5, 10, 0.02), ok=False)
    goodput = Slo.parse("ttft=1000,itl=50").goodput([fast, slow, failed], 10.0)
    assert goodput["met"] == 1 and goodput["share"] == pytest.approx(1 / 3)
    assert goodput["output_tokens_per_s"] == pytest.approx(1.0)


@pytest.mark.parametrize(("total", "counts"), [(6, [1, 2, 1, 2]), (4, [1, 1, 1, 1]), (3, [0, 1, 1, 1])])
def test_usage_is_shared_out_over_chunks(total: int, counts: list[int]) -> None:
    seen = stream(steps(0.0, 4))
    seen.completion_usage = total
    seen.settle(has_ids=False, running_usage=[None] * 4, reasoning=[False] * 4)
    assert seen.source is TokenSource.USAGE and seen.counts == counts


# ------------------------------------------------------------ comparison


@pytest.fixture(scope="module")
def noisy() -> dict[str, Any]:
    """A report whose slices and streams scatter by a few per cent."""
    rng = np.random.default_rng(7)
    samples = {
        "ttft_ms": list(rng.normal(500, 20, 64)),
        "tpot_ms": list(rng.normal(50, 2, 64)),
        "latency_ms": list(rng.normal(9000, 200, 64)),
        "steady_slices": [[float(tokens), 1.0] for tokens in rng.normal(300, 9, 40)],
        "itl_sketches_ms": [list(np.sort(rng.normal(50, 2, 41))) for _ in range(40)],
    }
    run = {"label": "C=16", "concurrency": 16, "rate": None, "failure": "", "samples": samples}
    return {"benchmark": "isthmus bench serve", "version": 1, "conditions": {"model": "m"}, "runs": [run]}


def faster(report: dict[str, Any], factor: float) -> dict[str, Any]:
    changed = copy.deepcopy(report)
    for run in changed["runs"]:
        slices = run["samples"]["steady_slices"]
        run["samples"] = {**run["samples"], "steady_slices": [[tokens * factor, seconds] for tokens, seconds in slices]}
    return changed


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {row["metric"]: row["verdict"] for row in result["rows"]}


def test_report_against_itself_shows_no_difference(noisy: dict[str, Any]) -> None:
    assert set(verdicts(compare(noisy, noisy)).values()) == {"no difference shown"}


def test_five_per_cent_are_seen_and_half_a_per_cent_is_not(noisy: dict[str, Any]) -> None:
    repeated = {**noisy, "runs": [copy.deepcopy(noisy["runs"][0]) for _ in range(3)]}
    assert verdicts(compare(repeated, faster(repeated, 1.05)))["tokens/s steady"] == "B better"
    assert verdicts(compare(repeated, faster(repeated, 0.95)))["tokens/s steady"] == "B worse"
    assert verdicts(compare(repeated, faster(repeated, 1.005)))["tokens/s steady"] == "no difference shown"


def test_verdict_on_one_run_a_side_is_about_that_run(noisy: dict[str, Any]) -> None:
    assert verdicts(compare(noisy, faster(noisy, 1.05)))["tokens/s steady"] == "B better in this one run"


def test_failed_and_missing_runs_are_named_and_not_compared(noisy: dict[str, Any]) -> None:
    broken = copy.deepcopy(noisy)
    broken["runs"][0]["failure"] = "the server died"
    assert compare(noisy, broken)["rows"] == []
    assert compare(noisy, broken)["notes"] == ["C=16: not compared: B: the server died"]
    assert compare(noisy, {**noisy, "runs": []})["notes"] == ["C=16: not compared: B has no such run"]


def test_single_runs_are_said_to_hide_how_runs_vary(noisy: dict[str, Any]) -> None:
    assert "--repeat 3" in compare(noisy, noisy)["notes"][0]


def test_differing_conditions_are_shown(noisy: dict[str, Any]) -> None:
    other = {**noisy, "conditions": {"model": "other"}}
    assert "differs: model: 'm' and 'other'" in table(compare(noisy, other), "a", "b")


def test_other_files_are_refused(tmp_path: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="was not written by"):
        read_report(path)


def test_real_reports_compare(stock: dict[str, Any]) -> None:
    rows = compare(stock, stock)["rows"]
    assert len(rows) == 21 and all(row["ratio"] == 1 for row in rows)


# ------------------------------------------------------------ the page


class Checker(html.parser.HTMLParser):
    """Finds tags that are not closed in order."""

    VOID = ("meta", "path", "rect", "circle", "polygon")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in self.VOID or tag in ("rect", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)


def test_page_is_whole_and_needs_no_other_file(stock: dict[str, Any]) -> None:
    text = page(stock)
    checker = Checker()
    checker.feed(text)
    assert checker.faults == [] and checker.open == []
    assert checker.tags.count("svg") == 6 + 2 * len(stock["runs"])
    assert re.findall(r"(?:src|href|@import|url\()", text) == []


def test_page_has_light_and_dark_colours_for_the_same_names(stock: dict[str, Any]) -> None:
    light, dark = re.findall(r":root\{(.*?)\}", page(stock), re.S)
    assert set(re.findall(r"--\w+(?=:)", light)) == set(re.findall(r"--\w+(?=:)", dark))


def test_page_draws_nothing_beyond_its_frames(stock: dict[str, Any]) -> None:
    text = page(stock)
    assert "nan" not in re.sub(r"<pre>.*</pre>", "", text, flags=re.S).lower().replace("refinan", "")
    for cx, cy in re.findall(r'cx="([\d.-]+)" cy="([\d.-]+)"', text):
        assert 0 <= float(cx) <= 640 and 0 <= float(cy) <= 270


def test_page_shows_a_failed_run(measure: Any) -> None:
    report = measure(error_at_token=5, plan={"concurrencies": (2,), "num_requests": 4, "model": "<b>"})
    text = page(report)
    assert "FAILED: 4 of 4 requests failed" in text
    assert "<b>" not in text


@pytest.mark.parametrize("is_log", [False, True])
def test_axis_has_a_few_ticks_within_it(is_log: bool) -> None:
    for high in (0.3, 1, 7, 31.6, 250, 4_096, 1e6):
        axis = Axis.around([high / 50, high], "x", is_log=is_log)
        ticks = axis.ticks()
        assert 3 <= len(ticks) <= 12
        assert all(0 <= axis.share(tick) <= 1 for tick in ticks)
