"""Imports run one way, from deploy down to router and kernels; nothing that a leader loads brings torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("router", "prefill_worker", "decode_worker", "kv_transfer", "kernels", "engine", "bench", "deploy")

# what each layer may import of ours, itself aside; the longest prefix of a module's name decides
ALLOWED: dict[str, tuple[str, ...]] = {
    "router": (),
    "kernels": (),
    "kv_transfer": (),
    "engine.model": ("kernels", "kv_transfer.layout"),
    "engine": ("engine.model", "kernels", "kv_transfer", "router.protocol"),
    "prefill_worker": ("engine", "kv_transfer", "router.protocol"),
    "decode_worker": ("engine", "kv_transfer", "router.protocol"),
    "bench": ("router.tokenizer", "kernels.table"),
    # these run an engine in their own process, or read its bill
    "bench.in_process": ("engine", "kernels"),
    "bench.step": ("bench", "engine", "kernels.table"),
    "bench.pair": ("bench", "kernels.bench", "kernels.table"),
    "bench.ranks": ("engine",),
    "bench.all_reduce": ("bench", "engine", "kernels"),
    "bench.answers": ("bench", "engine", "kernels", "router.protocol"),
    "bench.push": ("bench", "engine", "kv_transfer", "router.protocol"),
    "bench.push_peer": ("engine", "kv_transfer"),
    "bench.prefill": ("bench", "engine"),
    "bench.weights": ("bench", "engine", "kernels"),
    "bench.weight_samples": ("engine", "kernels"),
    "bench.step_flags": ("engine.flags",),
    "bench.step_plot": ("bench", "engine.flags", "kernels.table"),
    "bench.step_projection": ("bench", "engine"),
    "bench.profile": ("bench", "engine", "kernels.table"),
    "deploy": PACKAGES,
}
NO_TORCH = (
    "router.__main__",
    "prefill_worker.leader",
    "prefill_worker.__main__",
    "decode_worker.leader",
    "decode_worker.__main__",
    "bench.serve",
    "bench.compare",
    "bench.step",
    "bench.prefill",
    "bench.profile",
    "bench.weights",
    "deploy.cluster",
    "deploy.cli",
    "deploy.tiny_model",
    "deploy.model_check",
    "deploy.model_synthesize",
    "engine.model.folder_check",
)


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    return max((layer for layer in ALLOWED if is_within(module, layer)), key=len)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imported_modules(path: Path) -> Iterator[str]:
    """Yield every module of ours named in an import statement, wherever in the file it stands."""
    module = module_name(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            # `from package import submodule` names a module, `from module import thing` does not
            names = [f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in PACKAGES)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_module_imports_only_layers_below_its_own(path: Path) -> None:
    layer = layer_of(module_name(path))
    allowed = (layer, *ALLOWED[layer])
    upward = [
        name
        for name in imported_modules(path)
        if not any(is_within(name, package) for package in allowed)
        or (layer == "engine.model" and layer_of(name) == "engine")
    ]
    assert upward == []


def test_the_checker_sees_a_forbidden_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for package in ("router", "engine", "engine/model"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    path = tmp_path / "router" / "app.py"
    path.write_text("def f():\n    from engine import model\n    import kernels.quant\n    from . import protocol\n")
    assert set(imported_modules(path)) == {"engine.model", "kernels.quant", "router"}


@pytest.mark.parametrize("module", NO_TORCH)
def test_no_torch_without_a_rank(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr or f"{module} imports torch"
