"""deploy/Dockerfile names only what exists, and leaves out nothing that `isthmus` needs."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from deploy import cli, preflight
from deploy.check_facts import read_host

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "deploy/Dockerfile").read_text()
KNOWN = ("FROM", "RUN", "USER", "WORKDIR", "COPY", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK")


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, rest), continued lines joined and comments left out."""
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def all_of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for rest in all_of("ENV") for word in shlex.split(rest))


def test_every_instruction_is_one_that_docker_knows() -> None:
    assert {name for name, _ in instructions()} <= {*KNOWN, "ENTRYPOINT", "CMD"}
    assert instructions()[0][0] == "FROM"


def test_everything_copied_is_here() -> None:
    for rest in all_of("COPY"):
        *sources, _ = [word for word in rest.split() if not word.startswith("--")]
        assert [source for source in sources if not (ROOT / source).exists()] == []


def test_environment_is_made_from_every_package_before_the_sources_come() -> None:
    names = [name for name, _ in instructions()]
    first = " ".join(rest for _, rest in instructions()[: [*names].index("RUN", names.index("USER"))])
    assert [package for package in preflight.PACKAGES if f"{package}/__init__.py" not in first] == []


def test_what_pip_is_told_to_install_exists() -> None:
    (install,) = re.findall(r"pip install (.*)", TEXT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"\.\[([\w,]+)\]", install)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert "-c constraints.txt" in install and (ROOT / "constraints.txt").is_file()


def test_torch_of_the_image_is_one_that_isthmus_admits() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [Requirement(line) for line in project["dependencies"] if re.match(r"torch\b", line)]
    (pinned,) = [Requirement(line) for line in project["optional-dependencies"]["gpu"]]
    assert pinned.name == "torch" and torch.specifier.contains(str(pinned.specifier).removeprefix("=="))


def test_it_runs_as_an_ordinary_user_who_owns_what_it_writes() -> None:
    assert all_of("USER") == ["isthmus"]
    assert all("--chown=isthmus" in rest for rest in all_of("COPY"))
    (volume,) = all_of("VOLUME")
    system = all_of("RUN")[0]
    assert f"install -d -o isthmus -g isthmus {' '.join(['/opt/isthmus', volume])}" in system
    assert "numactl" in system and "gcc" in system


def test_compiled_kernels_are_kept_where_the_check_looks(tmp_path: Path) -> None:
    variables = environment()
    (volume,) = all_of("VOLUME")
    assert Path(variables["TRITON_CACHE_DIR"]).is_relative_to(volume)
    assert read_host(variables, shared_memory=tmp_path).kernel_cache == Path(variables["TRITON_CACHE_DIR"])


def test_commands_that_it_runs_or_shows_exist() -> None:
    assert all_of("ENTRYPOINT") == ['["isthmus"]']
    assert all_of("CMD")[-1] == '["up"]' and "up" in cli.VERBS and "check" in cli.VERBS
    shown = re.findall(r"isthmus up (\S+\.yaml)", TEXT)
    assert shown and all((ROOT / path).is_file() for path in shown)


@pytest.mark.parametrize("kept", [".venv", ".git"])
def test_build_context_leaves_out_what_would_overwrite_the_environment(kept: str) -> None:
    assert kept in (ROOT / ".dockerignore").read_text().splitlines()


def test_folders_left_out_of_the_context_are_needed_by_nothing_that_runs() -> None:
    left_out = {line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.isidentifier()}
    assert not left_out & set(preflight.PACKAGES)
    assert "README.md" not in left_out  # pyproject.toml reads it
