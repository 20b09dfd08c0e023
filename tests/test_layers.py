"""Architecture as a test: a module imports only lower layers or its own, and stays small.

The table is design.md's. A module that is not in it fails, so that a new one is placed on purpose.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "kvbaton"

LAYERS = {
    "errors": 0, "prompt": 0, "templates": 0, "kv": 0, "rope": 0, "lowrank": 0,
    "references": 1, "correctors": 1, "selectors": 1, "gates": 1, "memory": 1, "store": 1,
    "recipes": 2, "plan": 2, "overrides": 2,
    "engine": 3,
    "agents": 4, "presets": 4, "team": 4, "teamfile": 4, "teamrun": 4, "vllm": 4,
    "bench": 5, "serve": 5,
    "cli": 6,
}  # fmt: skip
STDLIB_ONLY = ("errors", "prompt", "templates")
PARTS = ("correctors", "selectors")
NO_MODEL_LIBRARY = ("correctors", "selectors", "gates", "references", "memory", "store", "plan", "recipes")
"""Parts see plain tensors: the same part serves every engine."""

MODULE_LINES, PART_LINES, FUNCTION_LINES = 400, 150, 60


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def unit(path: Path) -> str:
    """The row of the table a file belongs to: its first folder or its stem."""
    return path.relative_to(SRC).with_suffix("").parts[0]


def dotted(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, module: str) -> list[tuple[int, str]]:
    """``(line, dotted name)`` of every import, nested ones included, ``TYPE_CHECKING`` ones too."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def breaches(source: str, module: str) -> list[str]:
    """What a module imports that it may not; empty if it keeps to the table."""
    here = module.split(".")[1]
    out = []
    for line, name in imports(ast.parse(source), module):
        top, *rest = name.split(".")
        if top == "kvbaton" and rest:
            target = rest[0]
            if LAYERS.get(target, -1) > LAYERS[here]:
                out.append(f"{module}:{line} (L{LAYERS[here]}) imports {name} (L{LAYERS[target]})")
        elif here in STDLIB_ONLY and top in ("torch", "numpy", "transformers", "pydantic", "yaml", "typer", "rich"):
            out.append(f"{module}:{line} imports {name}, but it is stdlib only")
        elif here in NO_MODEL_LIBRARY and top in ("transformers", "vllm"):
            out.append(f"{module}:{line} imports {name}: a part must not know its engine")
    return out


def long_functions(source: str) -> list[tuple[str, int]]:
    return [(node.name, size) for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (size := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES]


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_module_keeps_to_its_layer_and_its_size(path):
    source = path.read_text()
    lines = source.count("\n")
    part = unit(path) in PARTS or unit(path) == "gates"
    limit = PART_LINES if part else MODULE_LINES
    assert lines <= limit, f"{dotted(path)} has {lines} lines, {limit} are allowed: split it"
    assert not long_functions(source), f"functions over {FUNCTION_LINES} lines"
    if path == SRC / "__init__.py":
        return
    assert unit(path) in LAYERS, f"{dotted(path)} has no layer: add it to the table in {__file__}"
    assert not breaches(source, dotted(path))


@pytest.mark.parametrize(("source", "module"), [
    ("from kvbaton.engine.hf import HFEngine", "kvbaton.correctors.anchors"),
    ("def f():\n    import kvbaton.team", "kvbaton.engine.hf"),
    ("from ..plan import Plan", "kvbaton.correctors.anchors"),
    ("from kvbaton import recipes", "kvbaton.memory"),
    ("import torch", "kvbaton.prompt"),
    ("from transformers import AutoModel", "kvbaton.gates"),
])
def test_a_breach_is_found(source, module):
    assert breaches(source, module)


@pytest.mark.parametrize(("source", "module"), [
    ("from kvbaton.kv import KV", "kvbaton.correctors.anchors"),
    ("from .base import EdgeState", "kvbaton.correctors.anchors"),
    ("from kvbaton.plan import Plan", "kvbaton.engine.session"),
    ("import torch", "kvbaton.kv"),
])
def test_a_lawful_import_passes(source, module):
    assert not breaches(source, module)


def test_a_long_function_is_found():
    body = "\n".join(["def f():"] + ["    x = 1"] * FUNCTION_LINES)
    assert long_functions(body) == [("f", FUNCTION_LINES + 1)]
