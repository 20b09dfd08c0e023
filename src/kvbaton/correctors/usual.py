"""Usual: how unlike what was learned the texts of one edge are when they are new, and how much that varies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvbaton.correctors.fading import Fading

MEAN, SPREAD, WEIGHT = 1.25, 0.1, 2.0
"""Novelty of an edge's own texts before any came: mean, standard deviation, and how many texts this counts for."""


@dataclass
class Usual:
    """The novelty of the texts that came: ``level`` its mean, ``square`` the mean of its square."""

    level: Fading = field(default_factory=Fading)
    square: Fading = field(default_factory=Fading)

    def add(self, novelty: float | None) -> None:
        """A text of this novelty came; None: there was nothing to compare it with."""
        if novelty is not None:
            self.level.add(novelty)
            self.square.add(novelty**2)

    @property
    def mean(self) -> float:
        return (self.level.total + MEAN * WEIGHT) / (self.level.weight + WEIGHT)

    @property
    def spread(self) -> float:
        """Standard deviation."""
        square = (self.square.total + (MEAN**2 + SPREAD**2) * WEIGHT) / (self.square.weight + WEIGHT)
        return math.sqrt(max(square - self.mean**2, 0.0))

    def foreign(self, novelty: float | None, times: float, spreads: float) -> bool:
        """Above ``times`` the usual novelty, and ``spreads`` standard deviations above it: some slots vary a lot."""
        return novelty is not None and novelty > max(times * self.mean, self.mean + spreads * self.spread)
