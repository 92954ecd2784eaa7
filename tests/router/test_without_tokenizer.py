"""A model folder without tokenizer.json serves token ids, and says what is missing for the rest."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def shared_cluster(make_cluster):
    with make_cluster(has_tokenizer=False) as cluster:
        yield cluster


def test_token_ids_are_served_with_empty_text(cluster):
    choice = cluster.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 4}).json()["choices"][0]
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == 4


def test_streams_carry_token_ids_too(cluster):
    text = cluster.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 4, "stream": True}).text
    chunks = [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n")[:-2]]
    assert len([t for c in chunks for t in c["choices"][0]["token_ids"]]) == 4
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ("/v1/completions", {"prompt": "hi"}, "prompt"),
        ("/v1/completions", {"prompt": [5], "stop": ["x"]}, "stop"),
    ],
)
def test_what_needs_text_names_the_missing_file(cluster, path, fields, param):
    answer = cluster.post(path, fields)
    assert answer.status_code == 501
    assert "tokenizer.json" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param
