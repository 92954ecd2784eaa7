"""EncodingTexts: what is read from a model's encoding folder, what is not executed, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.encoding import EFFORTS, MAX_FILE_BYTES, MAX_TEXT_CHARS, EncodingTexts
from router.errors import InvalidRequest

PUBLISHED = Path(__file__).parents[3] / "shared" / "chat" / "texts.json"


def read(tmp_path: Path, source: str | bytes, name: str = "encoding_dsv4.py") -> EncodingTexts:
    folder = tmp_path / "encoding"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(source.encode() if isinstance(source, str) else source)
    texts = EncodingTexts.from_folder(tmp_path)
    assert texts is not None
    return texts


def test_no_file_is_none(tmp_path):
    assert EncodingTexts.from_folder(tmp_path) is None
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "README.md").write_text("X = 'text'")
    (tmp_path / "encoding" / "folder.py").mkdir()
    assert EncodingTexts.from_folder(tmp_path) is None


def test_published_constants_are_found_among_code(tmp_path):
    if not PUBLISHED.is_file():
        pytest.skip(f"no published texts at {PUBLISHED}")
    published = json.loads(PUBLISHED.read_text())
    source = "import re\nfrom typing import Dict\n"
    for n, (name, value) in enumerate(published.items()):
        source += f"{name}{': str' if n % 2 else ''} = ({value!r})\n\ndef f{n}(x):\n    {name} = x\n    return re.x\n\n"
    texts = read(tmp_path, source)
    assert texts.constants == published
    assert not texts.unreadable
    assert texts.release == "V4-Flash"
    assert texts.effort_text("max") == published["REASONING_EFFORT_MAX"]


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("X = 'a' 'b'", "ab"),
        ("X = ('a'\n 'b\\n')", "ab\n"),
        ("X = 'a' + 'b' + ('c' + 'd')", "abcd"),
        ("A = 'a'\nX = A + 'b'", "ab"),
        ("X: str = 'a'", "a"),
        ("X = Y = 'a'", "a"),
        ("X = 'a'\nX += 'b'", "ab"),
        ("X = 'a'\nX = 'b'", "b"),
        ("X = f()\nX = 'b'", "b"),
        ("X = '\\d'", "\\d"),
        ("A = 'k'\nX = {A: 'v' 'w', 'l': A}", {"k": "vw", "l": "k"}),
        ("A = {'k': 'v'}\nX = A", {"k": "v"}),
        ("X = " + " + ".join(["'a'"] * 500), "a" * 500),
        ("\ufeffX = 'a'", "a"),
    ],
)
def test_ways_to_write_a_text(tmp_path, source, value):
    texts = read(tmp_path, source)
    assert texts.constants["X"] == value
    assert "X" not in texts.unreadable


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("open('/etc/passwd').read()", "has a call"),
        ("f'{1}'", "has an f-string"),
        ("'a'.join", "has Attribute"),
        ("'a' * 3", "has BinOp"),
        ("LATER", "has a name"),
        ("b'a'", "has Constant"),
        ("{'a': f()}", "has a call"),
        ("{**LATER}", "merges another dict"),
    ],
)
def test_what_would_be_executed_is_named_only_when_needed(tmp_path, expression, reason):
    texts = read(tmp_path, f"TOOLS_TEMPLATE = {expression}\nresponse_format_template = '{{schema}}'\nLATER = 'x'\n")
    assert texts.render("response_format_template", param="response_format", schema="S") == "S"
    with pytest.raises(InvalidRequest) as refusal:
        texts.render("TOOLS_TEMPLATE", param="tools", tool_schemas="T")
    assert refusal.value.param == "tools"
    assert "TOOLS_TEMPLATE of encoding/encoding_dsv4.py" in refusal.value.message
    assert f"encoding_dsv4.py: line 1 {reason}" in refusal.value.message


def test_nothing_is_executed(tmp_path):
    trap = tmp_path / "executed"
    read(tmp_path, f"import pathlib\npathlib.Path({str(trap)!r}).touch()\nX = pathlib.Path({str(trap)!r}).touch()\n")
    assert not trap.exists()


def test_doubling_constants_end_at_the_limit(tmp_path):
    doubled = read(tmp_path, "X0 = 'a'\n" + "".join(f"X{n + 1} = X{n} + X{n}\n" for n in range(60)))
    assert max(map(len, doubled.constants.values())) == MAX_TEXT_CHARS == 2**20
    assert f"is longer than {MAX_TEXT_CHARS}" in doubled.unreadable["X21"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"X = (", "not Python"),
        (b"X = '\xff'", "not Python"),
        (b"X = 'a\0b'", "null bytes"),
        (b"X = " + b"(" * 5000 + b"'a'" + b")" * 5000, "not Python|nested too deeply"),
        (b"X = " + b"-" * 200_000 + b"1", "nested too deeply|not Python"),
        (b"#" * (MAX_FILE_BYTES + 1), "more than"),
    ],
    ids=["syntax", "not UTF-8", "NUL", "parentheses", "signs", "huge"],
)
def test_file_that_cannot_be_read_is_named(tmp_path, source, reason):
    with pytest.raises(ValueError, match=reason) as error:
        read(tmp_path, source)
    assert "encoding_dsv4.py" in str(error.value)


def test_main_file_wins_over_others(tmp_path):
    read(tmp_path, "X = 'a test'\nY = 'other'\nZ = 'first'", "a_test.py")
    read(tmp_path, "Z = 'second'", "b.py")
    texts = read(tmp_path, "X = 'main'\nY = f()\n")
    assert texts.constants == {"X": "main", "Z": "first"}
    assert texts.unreadable.keys() == {"Y"}
    assert texts.source == "encoding/encoding_dsv4.py, encoding/a_test.py, encoding/b.py"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("no place", "no place for tool_schemas"),
        ("{tool_schemas} {other}", "other"),
        ("{tool_schemas", "can't be filled"),
        ("{tool_schemas!r}", "can't be filled"),
        ("{tool_schemas:>9}", "can't be filled"),
        ("{} {tool_schemas}", "can't be filled"),
        ("{tool_schemas.__class__}", "can't be filled"),
    ],
)
def test_template_that_cannot_hold_the_tools_is_refused(template, reason):
    texts = EncodingTexts("encoding/x.py", {"TOOLS_TEMPLATE": template})
    with pytest.raises(InvalidRequest) as refusal:
        texts.render("TOOLS_TEMPLATE", param="tools", tool_schemas="T")
    assert reason in refusal.value.message
    assert refusal.value.code == "encoding_text_missing"


def test_doubled_braces_are_single_ones():
    texts = EncodingTexts("x", {"TOOLS_TEMPLATE": '{{"a"}} {tool_schemas}{tool_schemas}'})
    assert texts.render("TOOLS_TEMPLATE", param="tools", tool_schemas="{t}") == '{"a"} {t}{t}'


FLASH = "REASONING_EFFORT_MAX = 'old'\n"
FLASH_0731 = (
    "REASONING_EFFORT_PROMPTS: dict = {'low': '', 'high': 'old', 'max': 'new'}\nDEFAULT_REASONING_EFFORT = 'low'\n"
)


@pytest.mark.parametrize(
    ("source", "release", "shown"),
    [
        (FLASH, "V4-Flash", ["", "", "", "", "", "old"]),
        (FLASH_0731, "V4-Flash-0731", ["", "", "", "old", "old", "new"]),
        (FLASH + "REASONING_EFFORT_HIGH = 'high'\n", "V4-Flash-0731", ["", "", "", "high", "high", "old"]),
        (FLASH + FLASH_0731, "V4-Flash-0731", ["", "", "", "old", "old", "new"]),
    ],
    ids=["V4-Flash", "0731", "0731 by constants", "0731 with an old constant left"],
)
def test_release_decides_which_efforts_have_a_text(tmp_path, source, release, shown):
    texts = read(tmp_path, source)
    assert texts.release == release
    assert [texts.effort_text(effort) for effort in EFFORTS] == shown
    assert texts.effort_text(None) == texts.effort_text("none") == ""


def test_default_effort_may_have_a_text(tmp_path):
    texts = read(tmp_path, FLASH_0731.replace("EFFORT = 'low'", "EFFORT = 'high'"))
    assert texts.effort_text(None) == "old"


@pytest.mark.parametrize(
    ("texts", "effort", "words"),
    [
        (EncodingTexts(), "max", "needs encoding/encoding_dsv4.py in the model folder"),
        (EncodingTexts("encoding/x.py", {}), "max", "REASONING_EFFORT_MAX of encoding/x.py"),
        (EncodingTexts("encoding/x.py", {}, {"REASONING_EFFORT_PROMPTS": "why"}), "high", "PROMPTS of encoding/x.py"),
        (EncodingTexts("encoding/x.py", {}), "utmost", "'utmost' is none of none, minimal, low"),
    ],
)
def test_effort_without_its_text_is_refused(texts, effort, words):
    with pytest.raises(InvalidRequest, match="reasoning_effort: ") as refusal:
        texts.effort_text(effort)
    assert words in refusal.value.message
    assert refusal.value.param == "reasoning_effort"


def test_task_tokens(tmp_path):
    texts = read(tmp_path, "DS_TASK_SP_TOKENS = {'title': '<T>'}")
    assert texts.task_token("title", param="messages[0].task") == "<T>"
    with pytest.raises(InvalidRequest, match="'dance' is none of title"):
        texts.task_token("dance", param="messages[0].task")
    with pytest.raises(InvalidRequest, match=r"needs encoding/encoding_dsv4\.py"):
        EncodingTexts().task_token("title", param="messages[0].task")
