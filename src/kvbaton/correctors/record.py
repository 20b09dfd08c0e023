"""Record: how well an edge's correction has served so far. Kept with what the edge learned, read by `Residual`.

All errors are out of sample: a dense hop is measured with the map as it was before that hop was learned from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvbaton.correctors.fading import Fading
from kvbaton.correctors.usual import Usual
from kvbaton.errors import InvariantError, StoreError
from kvbaton.kv import KV

NEGLIGIBLE = 1e-6
"""Squared relative error below which nothing needs correcting: equal prefixes leave the rounding of the KV's dtype."""


@dataclass
class Record:
    """What happened on an edge.

    ``learned``: dense hops learned from. ``reused``: hops that reused the edge's segment. ``audits``: hops of which
    the divergence of reuse was measured. ``latest``: error of the last dense hop.
    ``offset``: squared error of the values without correction, relative to the values, mean over layers above 0;
    ``error``: the same with the correction. ``usual``: novelty of the texts that came.
    ``divergence``: measured, nats a token; ``audited``: the error that the same hop showed.
    """

    learned: int = 0
    reused: int = 0
    audits: int = 0
    latest: float | None = None
    offset: Fading = field(default_factory=Fading)
    error: Fading = field(default_factory=Fading)
    usual: Usual = field(default_factory=Usual)
    divergence: Fading = field(default_factory=Fading)
    audited: Fading = field(default_factory=Fading)

    def learned_from(self, offset: float, error: float | None, novelty: float | None) -> None:
        """A dense hop was learned from; ``error`` and ``novelty`` are None where there was no map yet."""
        self.learned += 1
        self.latest = offset if error is None else error
        if error is not None:
            self.error.add(error)
            self.offset.add(offset)
        self.usual.add(novelty)

    def reused_once(self, novelty: float | None) -> None:
        """A text of this novelty was reused."""
        self.reused += 1
        self.usual.add(novelty)

    def audited_once(self, divergence: float) -> None:
        """The hop that was learned from last would have diverged by ``divergence`` if it had reused."""
        if self.latest is not None:
            self.audits += 1
            self.divergence.add(divergence)
            self.audited.add(self.latest)

    @property
    def ratio(self) -> float | None:
        """Error with correction over error without, out of sample; None before a second text came."""
        return self.error.total / self.offset.total if self.offset.total > 0 else None

    @property
    def useless(self) -> bool:
        """The correction leaves as much error as it found, and what it found is not negligible."""
        return (self.ratio or 0.0) >= 1.0 and (self.offset.mean or 0.0) > NEGLIGIBLE

    @property
    def dense_share(self) -> float:
        """Share of the edge's hops so far that were dense, this one counted as one that is not."""
        return self.learned / (self.learned + self.reused + 1)

    @property
    def predicted(self) -> float | None:
        """Divergence expected of a reuse, nats a token; None before any was measured.

        Measured divergence per measured error, times the present error, and raised by 1 / sqrt(audits): the few
        first values of a skewed quantity are not trusted as they stand.
        """
        mean, error = self.divergence.mean, self.error.mean
        if mean is None:
            return None
        if error is not None and self.audited.total > 0:
            mean = self.divergence.total / self.audited.total * error
        return mean * (1.0 + 1.0 / math.sqrt(self.audits))

    def merge(self, other: Record) -> None:
        self.learned += other.learned
        self.reused += other.reused
        self.audits += other.audits
        for mine, theirs in zip(self._means(), other._means(), strict=True):
            mine.merge(theirs)

    def _means(self) -> tuple[Fading, ...]:
        return self.offset, self.error, self.usual.level, self.usual.square, self.divergence, self.audited

    def to_tensors(self) -> dict[str, Tensor]:
        latest = math.nan if self.latest is None else self.latest
        values = [float(self.learned), float(self.reused), float(self.audits), latest]
        values += [value for mean in self._means() for value in (mean.weight, mean.total)]
        return {"record": torch.tensor(values, dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Record:
        found = tensors.get("record")
        if found is None or found.shape != (16,) or found.dtype != torch.float64:
            raise StoreError("affine state: the record of its hops is missing or misshapen")
        values = found.tolist()
        counts, latest, means = values[:3], values[3], values[4:]
        if not all(math.isfinite(x) and x >= 0 for x in counts + means):
            raise StoreError("affine state: the record of its hops holds values that make no sense")
        learned, reused, audits = (int(x) for x in counts)
        record = cls(learned, reused, audits, None if math.isnan(latest) else latest)
        for i, mean in enumerate(record._means()):
            mean.weight, mean.total = means[2 * i:2 * i + 2]
        return record

    def check(self) -> None:
        if not all(math.isfinite(mean.total) and mean.weight >= 0 for mean in self._means()):
            raise InvariantError("the record of an edge holds values that are not finite")


@runtime_checkable
class Recorded(Protocol):
    """A state that keeps a `Record`; the engine tells it of reuses and audits."""

    @property
    def record(self) -> Record: ...

    def novelty(self, source: KV) -> float | None:
        """How unlike the texts learned a text is; None: nothing learned."""
        ...
