"""What a method was charged for: the three reuse ratios, rows per layer, bytes. A method that never reused is refused.

The source hop (a run's first) reuses nothing in any method and is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvbaton.engine.result import HopResult
from kvbaton.errors import DataError
from kvbaton.recipes import Recipe
from kvbaton.selectors.base import AllRows, NoRows
from kvbaton.selectors.layers import LayerBlock


@dataclass(frozen=True)
class Account:
    """Books of one method over its hops behind a source hop.

    ``nominal``: 1 - the selector's budget, None where the budget is an outcome; ``effective``: share of reusable
    entries (token x layer) not recomputed; ``hop``: share of hops that reused anything. ``rows_per_layer``: mean
    reused rows recomputed; ``extra_entries``: isolated encodes and query passes; ``boundary_bytes``: kept hidden
    states, inside ``held_bytes``. Byte counts are the largest of any hop, ``moved_bytes`` is the mean.
    """

    hops: int
    nominal: float | None
    effective: float
    hop: float
    rows_per_layer: tuple[float, ...]
    extra_entries: int
    moved_bytes: float
    held_bytes: int
    boundary_bytes: int
    learned_bytes: int
    reasons: tuple[tuple[str, int], ...]


def account(method: Recipe, runs: Iterable[Sequence[HopResult]]) -> Account:
    """Books of ``method`` over ``runs``, each the hops of one run in order. Raises DataError without a later hop."""
    runs = list(runs)
    later = [hop for run in runs for hop in run[1:]]
    if not later:
        raise DataError(f"{method.name!r}: no hop behind a source hop: a run needs two agents that read the same text")
    reusable = sum(hop.reusable_tokens * hop.layers for hop in later)
    kept = sum(hop.entries.reused + hop.entries.corrected for hop in later)
    layers = zip(*(hop.rows_per_layer for hop in later), strict=True)
    reasons = Counter(f"{decision.action}: {decision.reason}" for hop in later for decision in hop.decisions)
    return Account(
        hops=len(later), nominal=nominal_reuse(method, later[0].layers), effective=kept / reusable if reusable else 0.0,
        hop=sum(not hop.dense for hop in later) / len(later),
        rows_per_layer=tuple(sum(rows) / len(later) for rows in layers),
        extra_entries=sum(hop.extra_entries for run in runs for hop in run),
        moved_bytes=sum(hop.moved_bytes for hop in later) / len(later),
        held_bytes=max(hop.held_bytes for hop in later), boundary_bytes=max(hop.boundary_bytes for hop in later),
        learned_bytes=max(hop.learned_bytes for hop in later), reasons=tuple(reasons.most_common()))


def nominal_reuse(method: Recipe, layers: int) -> float | None:
    """1 - budget, as the papers state it; None where the budget is an outcome."""
    selector = method.selector
    if isinstance(selector, NoRows):
        return 1.0
    if isinstance(selector, AllRows):
        return 0.0
    if isinstance(selector, LayerBlock):
        return 1.0 - (selector.last - selector.first + 1) / layers
    share = getattr(selector, "share", None)
    return None if share is None else 1.0 - share


def require_reuse(method: Recipe, books: Account) -> None:
    """Raise DataError, with the reasons, if ``method`` never reused anything: its figures would be those of dense."""
    if books.hop == 0.0 and nominal_reuse(method, 1) != 0.0:
        why = "; ".join(f"{reason} ({count} x)" for reason, count in books.reasons) or "nothing was shared"
        raise DataError(f"{method.name!r} never reused anything in {books.hops} hops: {why}")
