"""What a cluster answers greedily, with its log probabilities: for bench.answers, which asks one runner the same.

Each prompt alone, then all of them at once, so that decode steps have one row and several. Nothing is asked for as
text: a model without tokenizer does, and names tokens by their ids.
"""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Sequence
from typing import Any

from bench.pair_processes import Cluster

TOP = 20  # log probabilities of each row
_ANSWER_WITHIN_S = 120.0
_NAME = "token_id:"


class NoAnswer(Exception):
    """The cluster did not answer as it should; the text has what it said."""


def prompt_of(length: int) -> list[int]:
    """Return the token ids of the prompt of that length."""
    return random.Random(length).choices(range(1000, 100_000), k=length)


def ask(cluster: Cluster, lengths: Sequence[int], *, output: int) -> list[dict[str, Any]]:
    """Return an entry for each answer: length, whether others were asked at once, token_ids, and `top` of each row.

    top: log probabilities by token id, the chosen one among them. Raises NoAnswer, OSError.
    """
    model = cluster.model_name()

    def answer(length: int, *, together: bool) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt_of(length), "max_tokens": output, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "logprobs": TOP}
        said = cluster.post("/v1/completions", body, timeout_s=_ANSWER_WITHIN_S)
        return {"length": length, "together": together, **rows_of(said, output)}

    found = [answer(length, together=False) for length in lengths]
    with concurrent.futures.ThreadPoolExecutor(len(lengths)) as pool:
        found += pool.map(lambda length: answer(length, together=True), lengths)
    return found


def rows_of(said: Any, output: int) -> dict[str, Any]:
    """Return token_ids and `top` of an answer. Raises NoAnswer."""
    if not isinstance(said, dict) or not said.get("choices"):
        raise NoAnswer(f"no answer: {str(said)[:300]}")
    choice = said["choices"][0]
    ids, tops = choice["token_ids"], (choice.get("logprobs") or {}).get("top_logprobs") or []
    if len(ids) != output or len(tops) != output:
        raise NoAnswer(f"{len(ids)} tokens with log probabilities of {len(tops)}, wanted {output} of each")
    if strange := [name for top in tops for name in top if not name.startswith(_NAME)]:
        raise NoAnswer(f"token {strange[0]!r} is named by its text: take a folder without tokenizer.json")
    return {"token_ids": ids, "top": [{name.removeprefix(_NAME): value for name, value in top.items()} for top in tops]}
