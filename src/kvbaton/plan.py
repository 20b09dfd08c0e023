"""What happens to each segment of a prompt, and why: decided before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvbaton.correctors.base import EdgeState
from kvbaton.gates import Verdict
from kvbaton.kv import KV
from kvbaton.memory import Memory
from kvbaton.prompt import Edge, Prompt, Segment, Span
from kvbaton.recipes import Recipe
from kvbaton.references import RunStore


class Action(Enum):
    RECOMPUTE = "recompute"
    REUSE = "reuse"
    CORRECT = "correct"


@dataclass(frozen=True)
class Step:
    """The decision on one shared segment. ``source`` stays set on a recompute: a dense hop learns from it."""

    index: int
    segment: Segment
    span: Span
    action: Action
    reason: str
    edge: Edge | None = None
    source: KV | None = None
    state: EdgeState | None = None
    predicted: float | None = None


@dataclass(frozen=True)
class Plan:
    """One decision a shared segment; ``dense``: nothing is reused in this hop."""

    steps: tuple[Step, ...]

    @property
    def dense(self) -> bool:
        return all(step.action is Action.RECOMPUTE for step in self.steps)

    @property
    def reused(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.action is not Action.RECOMPUTE)
