"""RouterConfig: flag > environment > default, and messages that say what to change."""

from __future__ import annotations

import pytest

from engine.front import HEARTBEAT_S
from router.config import RouterConfig, load
from router.dispatch import UNREADY_GRACE_S

FLAGS = ["--model", "m", "--prefill", "http://a:1", "--decode", "http://b:2/"]


def test_flags_win_over_the_environment_and_that_over_defaults():
    environ = {"ISTHMUS_PORT": "9000", "ISTHMUS_MAX_QUEUE": "7", "ISTHMUS_DEFAULT_THINKING": "true"}
    config = load([*FLAGS, "--port", "9001"], environ)
    assert (config.port, config.max_queue, config.default_thinking, config.host) == (9001, 7, True, "127.0.0.1")
    assert load([*FLAGS, "--no-default-thinking"], environ).default_thinking is False


def test_lists_are_repeated_flags_or_commas():
    config = load([*FLAGS, "--prefill", "http://a:3"], {"ISTHMUS_DECODE": "http://x:1"})
    assert (config.prefill, config.decode) == (("http://a:1", "http://a:3"), ("http://b:2",))
    environ = {"ISTHMUS_MODEL": "m", "ISTHMUS_PREFILL": "http://a:1, http://a:2", "ISTHMUS_DECODE": "http://b:1"}
    assert load([], environ).prefill == ("http://a:1", "http://a:2")


def test_the_name_is_the_folders_unless_given(tmp_path):
    config = RouterConfig(model=str(tmp_path / "dsv4-tiny"), prefill=("http://a",), decode=("http://b",))
    assert config.model_name == "dsv4-tiny"
    assert load([*FLAGS, "--served-model-name", "n"], {}).model_name == "n"


@pytest.mark.parametrize(
    ("flags", "environ", "text"),
    [
        ([], {}, "--model, --prefill, --decode"),
        ([*FLAGS, "--port", "70000"], {}, "port"),
        ([*FLAGS, "--prefill", "a:1"], {}, "http://HOST:PORT"),
        ([*FLAGS, "--decode", "http://a:1"], {}, "both as prefill and as decode"),
        (FLAGS, {"ISTHMUS_PORT": "many"}, "ISTHMUS_PORT"),
        (FLAGS, {"ISTHMUS_DEFAULT_THINKING": "maybe"}, "ISTHMUS_DEFAULT_THINKING"),
        ([*FLAGS, "--queue-timeout-s", "0"], {}, "queue_timeout_s"),
        ([*FLAGS, "--max-queue", "0"], {}, "max_queue"),
        ([*FLAGS, "--max-quue=3"], {}, "--max-quue: no such flag; did you mean --max-queue?"),
        ([*FLAGS, "--xyzzy", "3"], {}, "--xyzzy: no such flag; see --help"),
    ],
)
def test_values_that_cannot_be_are_named(capsys, flags, environ, text):
    with pytest.raises(SystemExit) as stop:
        load(flags, environ)
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


def test_help_teaches_with_examples(capsys):
    with pytest.raises(SystemExit):
        load(["--help"], {})
    text = capsys.readouterr().out
    assert "ISTHMUS_MAX_QUEUE" in text
    for field in RouterConfig.__struct_fields__:
        assert f"--{field.replace('_', '-')}" in text


def test_client_hears_of_a_worker_that_went_mute_in_time() -> None:
    config = load(FLAGS, {})
    assert config.worker_silence_s + config.worker_lost_s + UNREADY_GRACE_S <= 4.5  # promised: 5 s
    assert config.worker_silence_s >= 2 * HEARTBEAT_S
