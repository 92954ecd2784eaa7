"""Bars of the runs on several GPUs: what is met, missed, missing, and not judged on a CPU."""

import json

import pytest

from bench.bars import judge, main


@pytest.fixture
def report(tmp_path):
    """A function that writes a report and returns its path."""

    def write(**fields):
        path = tmp_path / "report.json"
        path.write_text(json.dumps(fields))
        return path

    return write


def outcomes(kind, path, *, dry=False):
    return {row["bar"]: (row["measured"], row["met"]) for row in judge(kind, path, dry=dry)}


def steps(**shares):
    return [{"batch": int(name[1:]), "share_of_floor": share} for name, share in shares.items()]


def test_a_step_has_a_bar_for_each_batch_and_one_that_was_not_measured_is_missed(report):
    path = report(runs=steps(b1=0.31, b16=0.39))
    name = "floor with sums, of a step at B = {}"
    assert outcomes("step", path) == {
        name.format(1): (0.31, True),
        name.format(16): (0.39, False),
        name.format(64): (None, False),
    }
    assert [row["met"] for row in json.loads(path.read_text())["bars"]] == [True, False, False]


def test_what_is_time_is_not_judged_in_a_dry_run(report):
    assert {met for _, met in outcomes("step", report(runs=steps(b1=0.01)), dry=True).values()} == {None}


def sums(**timings):
    sizes = ("8192", "16384", "32768", "65536")
    ways = {way: dict(zip(sizes, times, strict=True)) for way, times in timings.items()}
    return {way.replace("_", "-"): found for way, found in ways.items()}


def test_one_shot_sums_are_held_against_the_fastest_of_nccl_whenever_it_was_measured(report):
    met = [
        {"way": "LL, Ring", "num_bytes": 8192, "us": 6.0},
        {"way": "one-shot", "num_bytes": 8192, "us": 5.0},
        {"way": "auto", "num_bytes": 8192, "us": 9.0},
    ]
    taken = sums(auto=[9, 9, 9, 9], one_shot=[7, 9, 10, 8], chosen=[1, 1, 1, 1])
    found = outcomes("all_reduce", report(sums_us=taken, exchange={"timings": met}))
    assert [met for _, met in found.values()] == [False, True, False, True]
    assert found["one-shot over NCCL, 8 KiB"][0] == pytest.approx(7 / 6)


def test_one_shot_sums_that_there_are_none_of_are_missed(report):
    found = outcomes("all_reduce", report(sums_us=sums(auto=[9, 9, 9, 9]), exchange={"timings": []}))
    assert list(found.values()) == [(None, False)] * 4


def transfer(tokens, chunk, share, arrival_us, order="merged"):
    run = {"tokens": tokens, "chunk_tokens": chunk, "order": order}
    return run | {"share_of_one_piece": share, "arrival_us": arrival_us}


def test_a_transfer_is_judged_by_neighbours_and_at_every_length_asked_for(report):
    runs = [transfer(8192, 0, 0.7, 9000), transfer(8192, 4096, 0.1, 900), transfer(8192, 0, 0.1, 1, "fragmented")]
    conditions = {"chunk_tokens": 4096, "lengths": [8192, 131072]}
    assert list(outcomes("transfer", report(conditions=conditions, runs=runs)).values()) == [
        (0.7, True),
        (0.9, True),
        (None, False),
        (None, False),
    ]


def pair(**fields):
    conditions = {"runs": ["wave", "ttft"], "concurrency": [1, 16]}
    runs = {"wave1": [{"failed": 0}], "wave16": [{"failed": 2}]}
    itl = [{"concurrency": 1, "ratio": 1.1}, {"concurrency": 16, "ratio": 1.2}]
    splits = {"ttft": {"exposed_ms": 0.8}}
    return {"conditions": conditions, "runs": runs, "itl": itl, "splits": splits, "problems": []} | fields


def test_a_pair_is_judged_by_what_it_ran(report):
    assert outcomes("pair", report(**pair())) == {
        "ITL over the engine's step, C = 1": (1.1, True),
        "ITL over the engine's step, C = 16": (1.2, False),
        "exposed of a long prompt, ms": (0.8, True),
        "failed requests": (2, False),
        "problems": (0, True),
    }


def test_very_long_prompts_are_judged_where_they_come_alone(report):
    conditions, splits = {"runs": ["longest"], "concurrency": [1]}, {"longest1": {"exposed_ms": 1.5}, "longest4": {}}
    found = outcomes("pair", report(**pair(conditions=conditions, splits=splits)))
    assert found["exposed of a very long prompt, ms"] == (1.5, False)


def test_failed_requests_and_problems_are_judged_in_a_dry_run_too(report):
    found = outcomes("pair", report(**pair(problems=["not ready"])), dry=True)
    assert [met for _, met in found.values()] == [None, None, None, False, False]


def test_strikes_are_counted_by_their_faults(report):
    faults = [{"fault": ""}, {"fault": "wrong tokens"}]
    path = report(**pair(conditions={"runs": ["faults"], "concurrency": [1]}, faults=faults))
    assert outcomes("pair", path) == {"strikes with a fault": (1, False), "problems": (0, True)}


def test_trials_are_judged_by_the_way_of_their_sums(report):
    trial = {"rows": 24, "equal_argmax": 24, "fault": ""}
    trials = [trial | {"all_reduce": "nccl"}, trial | {"all_reduce": "one-shot", "equal_argmax": 23, "fault": "argmax"}]
    assert [met for _, met in outcomes("correctness", report(trials=trials)).values()] == [True, True, False, False]


def test_a_push_may_slow_prefill_so_much(report):
    runs = [{"prompt": 8192, "order": order, "slowed_share": 0.04, "exposed_ms": 0.5} for order in ("merged", "other")]
    assert list(outcomes("push", report(runs=runs)).values()) == [(0.04, False), (0.5, True)]


def test_answers_are_judged_by_tokens_and_by_log_probabilities(report):
    total = {"rows": 64, "wrong_share": 0.1, "p95": 0.5, "median": 0.2, "control": 9.0}
    bounds = {"wrong_share": 0.05, "p95": 0.6, "median": 0.1}
    found = outcomes("answers", report(total=total, bounds=bounds), dry=True)
    assert [met for _, met in found.values()] == [False, False, True, True]


def test_the_command_says_what_is_not_met_and_misses_what_it_cannot_read(report, tmp_path, capsys):
    assert main([f"step={report(runs=steps(b1=1.0, b16=1.0, b64=1.0))}"]) == 0
    assert main([f"step={tmp_path / 'none.json'}"]) == 1
    assert "not met: none: no report of step (FileNotFoundError)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["steps=report.json"])
