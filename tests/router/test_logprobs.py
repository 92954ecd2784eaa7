"""Log probabilities in the shapes of both routes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.logprobs import LOWEST, LogprobFormat
from router.protocol import TokenLogprobs

EOS = 1


def of(token: int, logprob: float = -0.5, num_top: int = 2) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=logprob, top_ids=[token + n for n in range(num_top)], top_logprobs=[logprob - n for n in range(num_top)]
    )


@pytest.fixture(scope="module")
def by_byte(tokenizer):
    return {data: i for i, data in enumerate(tokenizer.token_bytes) if len(data) == 1}


def test_chat_shows_each_token_with_its_bytes_and_alternatives(tokenizer):
    (token,) = tokenizer.encode("Hello")
    shown = LogprobFormat(tokenizer, is_chat=True, num_top=2).format([token], [of(token)])
    (entry,) = shown["content"]
    assert (entry["token"], entry["logprob"], bytes(entry["bytes"])) == ("Hello", -0.5, b"Hello")
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.5]
    assert [bytes(top["bytes"]) for top in entry["top_logprobs"]] == tokenizer.token_bytes[token : token + 2]


def test_chat_without_alternatives_has_an_empty_list(tokenizer):
    shown = LogprobFormat(tokenizer, is_chat=True, num_top=0).format([500], [of(500)])
    assert shown["content"][0]["top_logprobs"] == []


def test_parts_of_a_character_show_by_their_bytes(tokenizer, by_byte):
    token = by_byte[b"\xf0"]
    chat = LogprobFormat(tokenizer, is_chat=True, num_top=0).format([token], [of(token)])
    assert (chat["content"][0]["token"], chat["content"][0]["bytes"]) == ("\ufffd", [0xF0])
    shown = LogprobFormat(tokenizer, is_chat=False, num_top=0).format([token], [of(token)])
    assert (shown["tokens"], shown["top_logprobs"]) == (["bytes:\\xf0"], None)


def test_tokens_that_are_not_shown_have_no_entry(tokenizer):
    hiding = LogprobFormat(tokenizer, is_chat=True, num_top=0)
    assert not hiding.shows([EOS])
    assert hiding.format([EOS], [of(EOS)]) == {"content": [], "refusal": None}
    assert len(hiding.format([500, EOS], [of(500), of(EOS)])["content"]) == 1
    showing = LogprobFormat(tokenizer, is_chat=True, num_top=0, hides_special=False)
    assert showing.format([EOS], [of(EOS)])["content"][0]["token"] == "<｜end▁of▁sentence｜>"


def test_completions_name_the_chosen_token_among_the_best_even_if_it_is_not(tokenizer):
    chosen, best = tokenizer.encode("cat")[0], tokenizer.encode("dog")[0]
    shown = LogprobFormat(tokenizer, is_chat=False, num_top=1).format(
        [chosen], [TokenLogprobs(logprob=-3.0, top_ids=[best], top_logprobs=[-0.1])]
    )
    assert shown["top_logprobs"] == [{"dog": -0.1, "cat": -3.0}]


@settings(max_examples=50, deadline=None)
@given(text=st.text(min_size=1, max_size=30), cut=st.integers(0, 30))
def test_offsets_are_the_places_of_the_tokens_in_the_text(tokenizer, text, cut):
    ids = tokenizer.encode(text)
    shown = LogprobFormat(tokenizer, is_chat=False, num_top=0, hides_special=False)
    offsets = []
    for part in (ids[:cut], ids[cut:]):
        offsets += shown.format(part, [of(t) for t in part])["text_offset"]
    data = [tokenizer.token_bytes[t] for t in ids]
    assert offsets == [len(b"".join(data[:n]).decode("utf-8", "ignore")) for n in range(len(ids))]


def test_what_can_not_be_is_a_number_json_has(tokenizer):
    shown = LogprobFormat(tokenizer, is_chat=True, num_top=2).format([500], [of(500, float("-inf"))])
    (entry,) = shown["content"]
    assert {entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])} == {LOWEST}


@pytest.mark.parametrize("is_chat", [True, False])
def test_without_a_tokenizer_tokens_show_as_ids(is_chat):
    shown = LogprobFormat(None, is_chat=is_chat, num_top=1).format([7], [of(7)])
    name = shown["content"][0]["token"] if is_chat else shown["tokens"][0]
    assert name == "token_id:7"
