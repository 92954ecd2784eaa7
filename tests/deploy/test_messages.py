"""What the `isthmus` command says: one line for a slip, help that teaches, and a way back to the command itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import cli, progress


def test_unknown_flag_suggests_one_even_of_those_for_one_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--decode-max-num-seq", "4"]) == 2
    assert capsys.readouterr().err == (
        "isthmus plan: --decode-max-num-seq: no such flag; did you mean --decode-max-num-seqs?\n"
    )


def test_drain_that_would_end_at_no_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drain", "decode-0", "--timeout", "nan"]) == 2
    assert capsys.readouterr().err == (
        "isthmus drain: --timeout nan: wanted seconds, 0 or more; 0 waits without limit\n"
    )


@pytest.mark.parametrize("verb", ["up", "plan", "check"])
def test_help_teaches_with_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    assert f"isthmus {verb} cluster.yaml --decode-max-num-seqs 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("called", "on_path", "wanted"),
    [
        (".venv/bin/isthmus", False, ".venv/bin/isthmus"),
        (".venv/bin/isthmus", True, "isthmus"),
        ("/usr/lib/python3/cli.py", False, "isthmus"),
    ],
)
def test_command_is_named_so_that_it_can_be_typed(
    called: str, on_path: bool, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_path:
        (tmp_path / "isthmus").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", [called])
    assert progress.own_command() == wanted
