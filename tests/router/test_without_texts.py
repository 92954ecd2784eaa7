"""A model folder without `encoding`: plain chat works, and what needs the model's own texts names the missing file."""

from __future__ import annotations

import pytest

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def shared_cluster(make_cluster):
    with make_cluster(has_texts=False) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "fields",
    [{}, {"thinking": {"type": "enabled"}}, {"reasoning_effort": "low"}, {"tools": TOOLS, "tool_choice": "none"}],
)
def test_what_needs_no_text_works(cluster, fields):
    assert cluster.post("/v1/chat/completions", {"messages": HI, "max_tokens": 2} | fields).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "max"}, "reasoning_effort"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_needs_one_names_the_file(cluster, path, fields, param):
    answer = cluster.post(path, {"messages": HI} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "encoding_dsv4.py" in answer.json()["error"]["message"]
