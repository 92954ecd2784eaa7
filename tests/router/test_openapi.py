"""The served description: it names every route and field, its references hold, and its examples work."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from router import refusals
from router.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

KINDS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@pytest.fixture(scope="module")
def described(shared_cluster) -> dict[str, Any]:
    return shared_cluster.http.get("/openapi.json").json()


def schema_of(described: dict[str, Any], path: str) -> dict[str, Any]:
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return described["components"]["schemas"][body["schema"]["$ref"].rsplit("/", 1)[1]]


def test_every_reference_leads_somewhere(described):
    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if "$ref" in value else set()
            return own.union(*(references(v) for v in value.values()))
        return set().union(*(references(v) for v in value)) if isinstance(value, list) else set()

    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert references(described)
    assert references(described) <= known


@pytest.mark.parametrize("path", KINDS)
def test_every_field_that_is_honoured_is_described_and_no_other(described, path):
    fields = set(KINDS[path].__struct_fields__)
    assert set(schema_of(described, path)["properties"]) == fields - set(refusals.NEUTRAL) - {"forced_token_ids"}


@pytest.mark.parametrize("path", KINDS)
def test_examples_are_answered(cluster, described, path):
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert cluster.post(path, body["example"]).status_code == 200


def test_every_route_that_is_read_is_there(cluster, described):
    for path, operations in described["paths"].items():
        if "get" in operations:
            assert cluster.http.get(path.replace("{name}", "dsv4-tiny")).status_code == 200, path


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "n", "presence_penalty", "top_logprobs"])
def test_the_ranges_described_are_the_ranges_checked(cluster, described, field):
    allowed, _ = schema_of(described, "/v1/chat/completions")["properties"][field]["anyOf"]
    low, high = allowed["minimum"], allowed["maximum"]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True}
    assert [cluster.post("/v1/chat/completions", body | {field: v}).status_code for v in (low, high)] == [200, 200]
    for value in (low - 1, high + 1):
        answer = cluster.post("/v1/chat/completions", body | {field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_the_roles_described_are_the_roles_taken(cluster, described):
    roles = described["components"]["schemas"]["ChatMessage"]["properties"]["role"]["enum"]
    refused = cluster.post("/tokenize", {"messages": [{"role": "?", "content": "x"}]}).json()["error"]["message"]
    assert refused.endswith(f"none of {', '.join(roles)}")


def test_it_is_small_enough_to_be_read(described):
    assert len(msgspec.json.encode(described)) < 50_000
    assert json.dumps(described).count("description") > 3
