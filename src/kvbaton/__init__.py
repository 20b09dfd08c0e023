"""KVBaton: agents that share a language model hand its KV cache on.

Public names are looked up on first use: importing this package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbaton.agents import Agent
    from kvbaton.engine.models import load
    from kvbaton.errors import KVBatonError
    from kvbaton.recipes import Recipe, recipe
    from kvbaton.team import Team
    from kvbaton.teamfile import TeamSpec, load_team
    from kvbaton.teamrun import TeamRun
    from kvbaton.vllm.client import openai_client

__version__ = "0.1.0"

_HOME = {
    "Agent": "kvbaton.agents",
    "KVBatonError": "kvbaton.errors",
    "Recipe": "kvbaton.recipes",
    "Team": "kvbaton.team",
    "TeamRun": "kvbaton.teamrun",
    "TeamSpec": "kvbaton.teamfile",
    "load": "kvbaton.engine.models",
    "load_team": "kvbaton.teamfile",
    "openai_client": "kvbaton.vllm.client",
    "recipe": "kvbaton.recipes",
}

__all__ = [
    "Agent", "KVBatonError", "Recipe", "Team", "TeamRun", "TeamSpec", "__version__", "load", "load_team",
    "openai_client", "recipe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvbaton' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
