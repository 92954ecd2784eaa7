"""engine/flags.py: precedence, conversion, and errors that say what to do."""

from __future__ import annotations

import argparse

import msgspec
import pytest

from engine.config import EngineConfig
from engine.flags import FIELDS, ConfigError, add_engine_flags, engine_config, parse_flags, unknown_variables


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return parser.parse_args(["--model", "m", *words])


def merged(*words: str, yaml: dict | None = None, environ: dict[str, str] | None = None) -> EngineConfig:
    return engine_config(parse(*words), role="decode", yaml_section=yaml, environ=environ or {})


def test_every_config_field_has_a_flag() -> None:
    assert {field.name for field in FIELDS} == set(EngineConfig.__struct_fields__) - {"role"}


def test_flag_wins_over_environment_over_yaml_over_default() -> None:
    everything = {
        "yaml": {"max_num_seqs": 3, "max_num_batched_tokens": 30, "block_size": 512},
        "environ": {"ISTHMUS_MAX_NUM_SEQS": "2", "ISTHMUS_MAX_NUM_BATCHED_TOKENS": "20"},
    }
    config = merged("--max-num-seqs", "1", **everything)
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    assert config.max_num_seqs == 1
    assert config.max_num_batched_tokens == 20
    assert config.block_size == 512
    assert config.landings_ahead == defaults["landings_ahead"]


def test_empty_environment_variable_counts_as_absent() -> None:
    assert merged(environ={"ISTHMUS_DTYPE": ""}).dtype == merged().dtype


def test_nothing_given_is_the_default_config() -> None:
    assert merged() == EngineConfig(model="m", role="decode")


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--model-path", "model"),
        ("--tp", "ranks"),
        ("--tensor-parallel-size", "ranks"),
        ("--chunked-prefill-size", "max_num_batched_tokens"),
        ("--max-running-requests", "max_num_seqs"),
        ("--context-length", "max_model_len"),
        ("--page-size", "block_size"),
    ],
)
def test_names_of_other_engines_are_accepted(flag: str, name: str) -> None:
    assert str(getattr(merged(flag, "384"), name)) == "384"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("index_hadamard", "true", True),
        ("index_hadamard", "false", False),
        ("pool_poison", "1", True),
        ("kv_cache_memory_gib", "0.5", 0.5),
        ("dtype", "fp32", "float32"),
        ("kv_cache_dtype", "bfloat16", "bf16"),
    ],
)
def test_text_becomes_the_type_of_the_field(name: str, text: str, value: object) -> None:
    assert getattr(merged(environ={f"ISTHMUS_{name.upper()}": text}), name) == value


@pytest.mark.parametrize(
    ("yaml", "wanted"),
    [
        ({"max_num_seq": 3}, "max_num_seq (YAML): no such setting; did you mean max_num_seqs?"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0 (YAML): out of bounds; wanted a whole number from 1 to 65536"),
        ({"dtype": "fp16"}, "dtype = 'fp16' (YAML): wanted one of float32, bfloat16"),
        ({"ranks": "two"}, "ranks = 'two' (YAML): wanted a whole number from 1 to 1024"),
        ({"ranks": True}, "ranks = True (YAML): wanted a whole number from 1 to 1024"),
        ({"port": 70000}, "port = 70000 (YAML): out of bounds; wanted a whole number from 0 to 65535"),
        ({"pool_poison": "maybe"}, "pool_poison = 'maybe' (YAML): wanted true or false"),
        ({"model": ["a"]}, "model = ['a'] (YAML): wanted a text"),
        ({"cpus": "3-1"}, "cpus '3-1': 3-1 runs backwards; wanted a list such as 0-15,32 (YAML)"),
    ],
)
def test_error_names_field_value_origin_and_remedy(yaml: dict, wanted: str) -> None:
    args = argparse.Namespace()
    with pytest.raises(ConfigError) as caught:
        engine_config(args, role="decode", yaml_section={"model": "m", **yaml}, environ={})
    assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--max-num-seq", "3"], "--max-num-seq: no such flag; did you mean --max-num-seqs?"),
        (["--block-sise=128"], "--block-sise: no such flag; did you mean --block-size?"),
        (["--xyzzy"], "--xyzzy: no such flag; see --help"),
        (["stray"], "stray: one argument too many; see --help"),
    ],
)
def test_unknown_flag_is_one_line_with_the_nearest_one(words: list[str], wanted: str) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_flags(parser)
    with pytest.raises(ConfigError) as caught:
        parse_flags(parser, words)
    assert str(caught.value) == wanted


def test_missing_model_says_where_to_give_it() -> None:
    with pytest.raises(ConfigError, match="add --model FOLDER, set ISTHMUS_MODEL"):
        engine_config(argparse.Namespace(), role="prefill", yaml_section=None, environ={})


def test_number_without_quotes_in_yaml_may_be_a_text() -> None:
    assert merged(yaml={"cpus": 3, "served_model_name": 4}).cpus == "3"


def test_misspelt_variable_is_named_with_the_nearest_setting() -> None:
    environ = {"ISTHMUS_MAX_NUM_SEQ": "3", "ISTHMUS_PREFILL_RANKS": "2", "ISTHMUS_MAX_QUEUE": "5", "PATH": "/bin"}
    assert unknown_variables(environ, ["max_queue"]) == [
        "ISTHMUS_MAX_NUM_SEQ: no setting reads this variable; did you mean ISTHMUS_MAX_NUM_SEQS?"
    ]


def test_logits_are_logged_only_where_test_seams_are_open() -> None:
    with pytest.raises(ConfigError, match=r"logits_log = 'x' \(YAML\): a test seam, and test_seams is false"):
        merged(yaml={"logits_log": "x"})
    assert merged(yaml={"logits_log": "x", "test_seams": True}).logits_log == "x"
