"""What a cluster has answered beside one runner: how rows are asked for, computed and compared."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.answers import Alone, compare
from bench.pair_answers import NoAnswer, ask, rows_of
from engine.config import EngineConfig

TINY = Path(__file__).parents[1] / "oracle" / "tiny"


def test_one_runner_has_the_golden_logits_of_what_it_is_fed():
    golden = load_file(TINY / "golden.safetensors")
    config = EngineConfig(role="prefill", model=str(TINY), dtype="float32", kv_cache_dtype="fp32", block_size=128)
    alone = Alone(config, longest=160, chunk=64)
    with torch.inference_mode():
        for length in (129, 64):
            rows = alone.rows(golden[f"prompt_{length}"].tolist(), golden[f"gen_{length}"].tolist())
            assert (torch.stack(rows) - golden[f"steplogits_{length}"]).abs().max() < 1e-4


LOGITS = [torch.tensor([3.0, 2.9, 0.0]), torch.tensor([0.0, 5.0, 1.0])]


def answered(*chosen, shift=0.0, logits=LOGITS):
    tops = [{str(i): float(v) + shift for i, v in enumerate(row.log_softmax(-1))} for row in logits]
    return {"length": 5, "together": False, "token_ids": list(chosen), "top": tops}


def test_rows_of_the_same_tokens_are_equal_and_as_far_away_as_their_log_probabilities():
    total = compare([answered(0, 1, shift=0.25)], [LOGITS], tie=0.2)["total"]
    assert [total[name] for name in ("rows", "equal", "ties", "wrong")] == [2, 2, 0, 0]
    assert total["greatest"] == pytest.approx(0.25) and total["median"] == pytest.approx(0.25)
    assert total["control"] > 2


def test_another_token_is_a_tie_or_wrong_by_the_runners_logits():
    found = compare([answered(1, 1), answered(1, 2)], [LOGITS, LOGITS], tie=0.2)
    assert [(entry["equal"], entry["ties"], entry["wrong"]) for entry in found["answers"]] == [(1, 1, 0), (0, 1, 1)]
    assert found["answers"][1]["margins_of_others"] == [pytest.approx(0.1), 4.0]


def test_rows_that_are_no_numbers_are_wrong_and_far_away():
    total = compare([answered(0, 1)], [[torch.full((3,), torch.nan)] * 2], tie=0.2)["total"]
    assert (total["wrong"], total["wrong_share"], total["greatest"], total["p95"]) == (2, 1.0, 1e9, 1e9)


def choice(**fields):
    top = [{"token_id:7": -0.5, "token_id:9": -1.0}]
    return {"choices": [{"token_ids": [7], "logprobs": {"top_logprobs": top}} | fields]}


def test_tokens_are_known_by_their_ids():
    assert rows_of(choice(), 1) == {"token_ids": [7], "top": [{"7": -0.5, "9": -1.0}]}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"error": "no"}, "no answer: {'error': 'no'}"),
        (None, "no answer: None"),
        (choice(token_ids=[7, 8]), "2 tokens with log probabilities of 1, wanted 1 of each"),
        (choice(logprobs=None), "1 tokens with log probabilities of 0"),
        (
            choice(logprobs={"top_logprobs": [{" and": -1.0}]}),
            "token ' and' is named by its text: take a folder without",
        ),
    ],
)
def test_an_answer_that_cannot_be_compared_says_why(said, problem):
    with pytest.raises(NoAnswer, match=problem):
        rows_of(said, 1)


def test_prompts_are_asked_one_by_one_and_then_all_at_once():
    asked = []

    class Cluster:
        def model_name(self):
            return "six-layers"

        def post(self, path, body, *, timeout_s):
            asked.append(len(body["prompt"]))
            return choice()

    found = ask(Cluster(), [40, 300], output=1)
    assert [(answer["length"], answer["together"]) for answer in found] == [
        *((40, False), (300, False)),
        *((40, True), (300, True)),
    ]
    assert asked[:2] == [40, 300] and sorted(asked[2:]) == [40, 300]
