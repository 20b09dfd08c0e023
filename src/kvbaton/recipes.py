"""A method is a recipe of four parts: reference, corrector, selector, gate.

The table is filled by `register`, one call a recipe; packages outside KVBaton add theirs through the entry-point
group ``kvbaton.recipes`` (an object with the recipe, or a function that returns it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib.metadata import entry_points

from kvbaton.correctors.base import Corrector, NoCorrection
from kvbaton.errors import UnknownName, UsageError
from kvbaton.gates import Always, Gate, Never
from kvbaton.references import Chained, Nothing, Reference
from kvbaton.selectors.base import AllRows, NoRows, Selector


class PrivateText(Enum):
    """What happens to the agent's own text behind shared text."""

    EXACT = "exact"
    """Computed afresh over whatever stands before it: short, and exact if that is."""
    STALE = "stale"
    """Reused from the agent's own last dense hop, as KVCMAS's and KVCOMM's releases do."""


class Mask(Enum):
    """Which keys a computed row may see."""

    EXACT = "exact"
    """Those at or before its own position."""
    BOTTOM_RIGHT = "bottom-right"
    """Those up to its index counted from the end of the active rows, as CacheBlend's reference code: a chosen row
    sees keys behind its own position."""


@dataclass(frozen=True)
class Recipe:
    """One method. Frozen; what it learns lives in `memory.Memory`."""

    name: str
    summary: str
    paper: str
    reference: Reference
    corrector: Corrector = field(default_factory=NoCorrection)
    selector: Selector = field(default_factory=NoRows)
    gate: Gate = field(default_factory=Always)
    private: PrivateText = PrivateText.EXACT
    mask: Mask = Mask.EXACT
    lead_rows: int = 0
    """First rows of every shared segment that are computed exactly with the private text before it."""
    hop_fallback: bool = False
    """Any refused segment sends the whole hop dense, as the originals do."""
    learn_approximate: bool = False
    """Learn also from sources that were themselves reused, as the originals do."""

    def __post_init__(self) -> None:
        if self.lead_rows < 0:
            raise UsageError(f"lead_rows must be 0 or more, got {self.lead_rows}")


_FACTORIES: dict[str, Callable[[], Recipe]] = {}


def register(factory: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Add a recipe: ``factory``'s name, with dashes for underscores, is the method's name."""
    name = factory.__name__.strip("_").replace("_", "-")
    if name in _FACTORIES:
        raise UsageError(f"a recipe named {name!r} is registered already")
    _FACTORIES[name] = factory
    return factory


@cache
def _load_entry_points() -> None:
    for point in entry_points(group="kvbaton.recipes"):
        loaded = point.load()
        if point.name in _FACTORIES:
            raise UsageError(f"entry point {point.value} registers {point.name!r}, which exists already")
        _FACTORIES[point.name] = (lambda value=loaded: value) if isinstance(loaded, Recipe) else loaded


def names() -> tuple[str, ...]:
    """Every registered method, in the order of the table."""
    _load_entry_points()
    return tuple(_FACTORIES)


def recipe(name: str) -> Recipe:
    """The recipe of that name. Raises UnknownName with the nearest one."""
    _load_entry_points()
    if name not in _FACTORIES:
        raise UnknownName("method", name, _FACTORIES)
    return _FACTORIES[name]()


def all_recipes() -> Iterator[Recipe]:
    return (recipe(name) for name in names())


@register
def dense() -> Recipe:
    return Recipe("dense", "Prefill everything: the exact result that every error is measured against.", "-",
                  Nothing(), selector=AllRows(), gate=Never())


@register
def full_shared() -> Recipe:
    return Recipe("full-shared", "Position-aligned reuse without correction.", "KVCMAS's FullShared", Chained())
