"""KVBaton: agents that share a language model hand its KV cache on.

Public names are looked up on first use: importing this package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbaton.errors import KVBatonError
    from kvbaton.recipes import Recipe, recipe

__version__ = "0.1.0"

_HOME = {
    "KVBatonError": "kvbaton.errors",
    "Recipe": "kvbaton.recipes",
    "recipe": "kvbaton.recipes",
}

__all__ = ["KVBatonError", "Recipe", "__version__", "recipe"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvbaton' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
