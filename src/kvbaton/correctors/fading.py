"""Fading: a running mean that forgets."""

from __future__ import annotations

from dataclasses import dataclass

FADE = 0.9
"""What a value still counts after the next one: a mean speaks of the last ten or so."""


@dataclass
class Fading:
    """A mean in which older values fade."""

    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.weight = FADE * self.weight + 1.0
        self.total = FADE * self.total + value

    def merge(self, other: Fading) -> None:
        self.weight += other.weight
        self.total += other.total

    @property
    def mean(self) -> float | None:
        return self.total / self.weight if self.weight else None
