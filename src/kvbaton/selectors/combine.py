"""Several selectors as one: Union takes what any of them wants, Split gives each its own share of the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from kvbaton.errors import UsageError
from kvbaton.selectors.base import Compared, Fixed, LayerView, Need, ReusedRows, Selection, Selector


class Budgeted(Selector, Protocol):
    """A selector whose budget is a ``share`` of the reused rows (`RandomRows`, `Deviation`, `QueryAttention`)."""

    @property
    def share(self) -> float: ...


Parts: TypeAlias = Sequence[tuple[Selection, Tensor]]
"""Selections with the rows ``[m]`` that each may choose from; a selection's own index i means row ``scope[i]``."""


@dataclass(frozen=True)
class _Combined:
    """What any combination asks of the engine: all that its ``parts`` ask."""

    parts: tuple[Selector, ...]

    def __post_init__(self) -> None:
        entries = {part.entry for part in self.parts if part.entry is not None}
        if len(entries) > 1:
            raise UsageError(f"combined selectors enter at layers {sorted(entries)}: rows can enter at one layer only")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset().union(*(part.needs for part in self.parts))

    @property
    def entry(self) -> int | None:
        return next((part.entry for part in self.parts if part.entry is not None), None)


@dataclass(frozen=True)
class Union(_Combined):
    """Compute every row that any of ``parts`` wants; overlaps are computed once."""

    def begin(self, reused: ReusedRows) -> Selection:
        return _Together([(part.begin(reused), reused.all()) for part in self.parts], reused)


@dataclass(frozen=True)
class Split(_Combined):
    """Spend a budget in order: each part takes its ``share`` of all reused rows from those that earlier parts left.

    Only the last part may choose anew above layer 0, because the others' rows must be known before it begins.
    """

    parts: tuple[Budgeted, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        total = sum(part.share for part in self.parts)
        if total > 1.0 + 1e-9:
            raise UsageError(f"the shares of a split budget add up to {total}, more than all rows")

    def begin(self, reused: ReusedRows) -> Selection:
        left, chosen = reused.all(), []
        for at, part in enumerate(self.parts):
            share = min(1.0, part.share * len(reused) / max(1, left.numel()))
            selection = replace(part, share=share).begin(_narrow(reused, left))  # type: ignore[type-var]
            chosen.append((selection, left))
            if at + 1 < len(self.parts):
                if not isinstance(selection, Fixed):
                    raise UsageError(f"{type(part).__name__} chooses above layer 0: put it last in a split budget")
                left = left[torch.isin(torch.arange(left.numel(), device=left.device), selection.rows, invert=True)]
        return _Together(chosen, reused)


def _narrow(reused: ReusedRows, rows: Tensor) -> ReusedRows:
    """Only ``rows`` of the reused rows."""
    def of(scores: Tensor | None) -> Tensor | None:
        return None if scores is None else scores[rows]

    return replace(reused, positions=reused.positions[rows], offsets=reused.offsets[rows],
                   segments=reused.segments[rows], attention=of(reused.attention), correction=of(reused.correction))


class _Together:
    """Runs selections side by side and shows each only its own rows."""

    def __init__(self, parts: Parts, reused: ReusedRows) -> None:
        self._parts, self._reused = parts, reused
        self._rows = [selection.start() for selection, _ in parts]

    def start(self) -> Tensor:
        rows = [scope[own] for own, (_, scope) in zip(self._rows, self._parts, strict=True)]
        active: Tensor = torch.unique(torch.cat([self._reused.none(), *rows]))
        return active

    def after(self, layer: int, view: LayerView) -> Tensor:
        self._rows = [selection.after(layer, _restrict(view, own, scope))
                      for own, (selection, scope) in zip(self._rows, self._parts, strict=True)]
        return self.start()


def _restrict(view: LayerView, own: Tensor, scope: Tensor) -> LayerView:
    """The view of a selection whose active rows are ``scope[own]``, in its own indices."""
    def compare() -> Compared:
        at = torch.searchsorted(view.rows, scope[own])
        return Compared(*(part[:, at] for part in view.compare()))

    return LayerView(own, compare, lambda queries: view.attention(queries)[scope])
