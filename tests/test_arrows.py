"""The import arrows of the design, read from the sources: no code has to run for an arrow to be broken."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SEAM = ("engine.config", "engine.protocol", "engine.estimate", "engine.backends", "engine.errors", "engine.loops")
LIGHT = (*SEAM, "engine.wire")
MACHINE_PATH = re.compile(r"^/(work|home|root|mnt|opt|srv|Users|media)(/|$)")


def sources(package: str) -> list[Path]:
    """Return every Python file of a package."""
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_of(module: str) -> Path | None:
    """Return the file of a module of this repository, None for anything else."""
    base = ROOT.joinpath(*module.split("."))
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(path: Path) -> Iterator[str]:
    """Yield every module a file imports, inside functions too. `from a import b` yields a.b where that is a module."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if source_of(inner) else base
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            yield node.args[0].value  # type: ignore[attr-defined,misc]


def _is_dynamic_import(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    constant = bool(call.args) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    return name in ("import_module", "__import__") and constant


def within(module: str, allowed: tuple[str, ...]) -> bool:
    """Return whether a module is one of these or lies below one."""
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def reachable(module: str) -> set[str]:
    """Return everything a module imports, directly or through modules of this repository, parents included."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        path = source_of(current)
        if path is not None:
            waiting += imported(path)
            waiting.append(current.rpartition(".")[0] or current)
    return seen


def test_the_tuner_touches_the_engine_only_at_the_seam() -> None:
    broken = [
        f"{module_name(path)} imports {module}"
        for path in sources("tuner")
        for module in imported(path)
        if within(module, ("engine",)) and not within(module, SEAM)
    ]
    assert broken == []


def test_the_engine_never_imports_the_tuner() -> None:
    broken = [module_name(p) for p in sources("engine") if any(within(m, ("tuner",)) for m in imported(p))]
    assert broken == []


def test_the_tuner_never_imports_torch() -> None:
    broken = [module_name(path) for path in sources("tuner") if any(within(m, ("torch",)) for m in imported(path))]
    assert broken == []


@pytest.mark.parametrize("module", LIGHT)
def test_the_seam_is_light(module: str) -> None:
    assert source_of(module) is not None
    heavy = {name for name in reachable(module) if within(name, ("torch", "transformers", "safetensors", "tuner"))}
    assert heavy == set()


def test_the_seam_loads_without_torch() -> None:
    """The same, by running it: what the syntax tree cannot see (a lazy import behind a function call) counts too."""
    statements = [f"import {module}" for module in LIGHT]
    check = "import sys; raise SystemExit('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", "; ".join([*statements, check])], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0


def strings(path: Path) -> Iterator[str]:
    """Yield the string constants of a file, docstrings left out."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


@pytest.mark.parametrize("package", ["engine", "tuner"])
def test_no_path_of_one_machine(package: str) -> None:
    broken = [
        f"{module_name(path)}: {text}"
        for path in sources(package)
        for text in strings(path)
        if MACHINE_PATH.match(text)
    ]
    assert broken == []


def test_nothing_climbs_out_of_the_repository() -> None:
    """A parent of a source file that lies above the repository is someone else's folder."""
    broken = []
    for path in (*sources("engine"), *sources("tuner")):
        depth = len(path.relative_to(ROOT).parts)
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Subscript) or isinstance(node.slice, ast.Tuple):
                continue  # a tuple indexes a tensor, such as a draft tree's parents
            if getattr(node.value, "attr", "") == "parents":
                index = node.slice.value if isinstance(node.slice, ast.Constant) else None
                if not isinstance(index, int) or index >= depth:
                    broken.append(f"{module_name(path)}:{node.lineno}")
    assert broken == []


# --- the rules themselves can fail ---


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("import torch.nn", "torch.nn"),
        ("def f():\n    from torch import nn", "torch"),
        ("from engine import kv_cache", "engine.kv_cache"),
        ("import importlib\nimportlib.import_module('torch')", "torch"),
        ("if True:\n    import engine.shape as s", "engine.shape"),
    ],
)
def test_imports_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, module: str) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text(text)
    monkeypatch.setattr(f"{__name__}.module_name", lambda path: "tuner.probe")
    assert module in list(imported(probe))


def test_reach_goes_through_other_modules() -> None:
    assert "engine.shape" in reachable("engine.backends")
    assert "torch" in reachable("engine.kv_cache")
