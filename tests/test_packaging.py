"""Our package names are plain words: nobody else may own them, and what is installed is this checkout."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy import preflight
from engine.flags import ConfigError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in found.items()}


def test_own_packages_resolve_to_this_checkout() -> None:
    for name in preflight.PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        assert Path(spec.origin).resolve() == ROOT / name / "__init__.py"


def test_no_other_distribution_provides_our_names() -> None:
    preflight.require_own_packages()


def test_a_clashing_distribution_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"kernels": ["isthmus", "some-kernels"]})
    with pytest.raises(ConfigError, match="pip uninstall some-kernels"):
        preflight.require_own_packages()


def test_every_folder_with_python_is_packaged_or_tests(project: dict) -> None:
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(pattern.rstrip("*") for pattern in patterns) == sorted(preflight.PACKAGES)
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(preflight.PACKAGES)


def test_tests_are_not_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_shipped_files_of_deploy_are_package_data(project: dict) -> None:
    patterns = project["tool"]["setuptools"]["package-data"]["deploy"]
    shipped = [path for path in (ROOT / "deploy").iterdir() if path.is_file() and path.suffix != ".py"]
    assert [path.name for path in shipped if not any(path.match(pattern) for pattern in patterns)] == []


def test_every_dependency_is_pinned_within_its_range(project: dict) -> None:
    from packaging.requirements import Requirement

    chosen_by_make = {"torch": "2.13.0", "triton": "3.6.0"}
    for line in [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["dev"]]:
        requirement = Requirement(line)
        name = requirement.name.lower().replace("_", "-")
        version = chosen_by_make.get(name) or pins()[name]
        assert requirement.specifier.contains(version), f"{line} does not admit {version}"


def test_makefile_pins_the_torch_that_the_tests_assume() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^TORCH\s*:= torch==2\.13\.0$", makefile, re.M)
    assert re.search(r"^TRITON\s*:= triton==3\.6\.0$", makefile, re.M)


def test_hugging_face_kernels_is_no_dependency(project: dict) -> None:
    assert "kernels" not in pins()
    assert not [line for line in project["project"]["dependencies"] if line.startswith("kernels")]


def test_a_wheel_can_not_be_published_by_accident(project: dict) -> None:
    assert "Private :: Do Not Upload" in project["project"]["classifiers"]


def test_console_command_answers_help() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0
    assert "usage: isthmus COMMAND" in result.stdout


def test_unknown_command_is_refused_with_the_list() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "fly"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "no such command: fly" in result.stderr and "decode-worker" in result.stderr


def test_sources_name_no_machine_paths() -> None:
    tracked = [path for package in preflight.PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    texts = [path for path in tracked if path.suffix in (".py", ".yaml", ".md", "") and "__pycache__" not in path.parts]
    texts += [ROOT / "Makefile", ROOT / ".ci" / "run"]
    assert [str(path) for path in texts if re.search(r"/(root|work|home)/\w", path.read_text())] == []
