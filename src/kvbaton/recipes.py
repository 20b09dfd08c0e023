"""A method is a recipe of four parts: reference, corrector, selector, gate.

The table is filled by `register`, one call a recipe; packages outside KVBaton add theirs through the entry-point
group ``kvbaton.recipes`` (an object with the recipe, or a function that returns it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from importlib.metadata import entry_points

from kvbaton.correctors.affine import Affine
from kvbaton.correctors.anchors import Anchors
from kvbaton.correctors.base import Corrector
from kvbaton.correctors.messages import AbsoluteMessages, Messages
from kvbaton.correctors.none import NoCorrection
from kvbaton.correctors.oracle import Oracle
from kvbaton.correctors.residuals import Residuals
from kvbaton.errors import UnknownName, UsageError
from kvbaton.gates import Always, Entropy, ExactKey, Gate, MessageEntropy, Never, Residual
from kvbaton.references import Chained, Isolated, Nothing, Origin, Reference
from kvbaton.selectors.attention import QueryAttention
from kvbaton.selectors.base import AllRows, NoRows, Selector
from kvbaton.selectors.combine import Union
from kvbaton.selectors.deviation import Deviation
from kvbaton.selectors.layers import LayerBlock
from kvbaton.selectors.leading import Leading
from kvbaton.selectors.random import RandomRows
from kvbaton.selectors.relay import Relay


class PrivateText(Enum):
    """What happens to the agent's own text behind shared text."""

    EXACT = "exact"
    """Computed afresh over whatever stands before it: short, and exact if that is."""
    STALE = "stale"
    """Reused from the agent's own last dense hop, as KVCMAS's release does."""
    ANCHORED = "anchored"
    """Own text behind shared text starts from the own text alone and is corrected like it, as KVCOMM does."""


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
        _FACTORIES[point.name] = _constant(loaded) if isinstance(loaded, Recipe) else loaded


def _constant(value: Recipe) -> Callable[[], Recipe]:
    return lambda: value


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


@register
def prompt_cache() -> Recipe:
    return Recipe("prompt-cache", "Reuse of texts encoded alone, without correction.",
                  "Prompt Cache, arXiv 2311.04934", Isolated())


@register
def droidspeak() -> Recipe:
    """Its block is SmolLM2's best of three layers (docs/results/field); `kvbaton profile` finds any other model's."""
    return Recipe("droidspeak", "Recompute one block of layers for every reused row, from kept hidden states.",
                  "DroidSpeak, arXiv 2411.02820", Chained(), selector=LayerBlock(first=16, last=18))


@register
def cacheblend() -> Recipe:
    return Recipe("cacheblend", "Recompute the rows whose values changed most at layer 1, with the exact mask.",
                  "CacheBlend, arXiv 2405.16444", Chained(), selector=Deviation(share=0.15))


@register
def cacheblend_bottomright() -> Recipe:
    return Recipe("cacheblend-bottomright", "CacheBlend with its reference code's mask: chosen rows see later keys.",
                  "CacheBlend's released code", Chained(), selector=Deviation(share=0.15), mask=Mask.BOTTOM_RIGHT)


@register
def relaycaching() -> Recipe:
    return Recipe("relaycaching", "Recompute a band of layers, then the rows that deviate or are attended to.",
                  "RelayCaching, arXiv 2603.13289", Origin(), selector=Relay())


@register
def epic() -> Recipe:
    return Recipe("epic", "Recompute the first 16 rows of every text encoded alone.",
                  "EPIC, arXiv 2410.15332", Isolated(), selector=Leading(rows=16))


@register
def prophetkv() -> Recipe:
    return Recipe("prophetkv", "Recompute the rows that the agent's own text attends to most.",
                  "ProphetKV, arXiv 2602.02579", Isolated(), selector=QueryAttention(share=0.2))


@register
def graphflow() -> Recipe:
    return Recipe("graphflow", "Add the sparse offset stored for this exact text and edge; anything else goes dense.",
                  "GraphFlow, arXiv 2605.22566", Isolated(), Residuals(drop_k=0.75, drop_v=0.70), gate=ExactKey())


@register
def graphflow_bare() -> Recipe:
    return Recipe("graphflow-bare", "GraphFlow without fallback: a text that is not stored is reused uncorrected.",
                  "GraphFlow as KVCMAS measured it", Isolated(), Residuals(sightings=1, drop_k=0.75, drop_v=0.70))


@register
def kvcomm() -> Recipe:
    return Recipe("kvcomm", "Add the mixed offsets of earlier texts, the agent's own text included; else go dense.",
                  "KVCOMM, arXiv 2510.12872", Isolated(writer=True, lead_tokens=4), Messages(), gate=MessageEntropy(),
                  private=PrivateText.ANCHORED, hop_fallback=True, learn_approximate=True)


@register
def kvcomm_upstream() -> Recipe:
    return replace(kvcomm(), name="kvcomm-upstream", paper="KVCOMM's released code", corrector=AbsoluteMessages(),
                   summary="KVCOMM with key offsets left at the positions where they were made, as released.")


@register
def kvcmas() -> Recipe:
    return Recipe("kvcmas", "Add the mixed low-rank offsets of earlier texts to what the agent before holds.",
                  "KVCMAS", Chained(), Anchors(rank=32), gate=Entropy())


@register
def kvcmas_isolated() -> Recipe:
    return replace(kvcmas(), name="kvcmas-isolated", paper="KVCMAS's ablation", reference=Isolated(),
                   summary="KVCMAS from texts encoded alone.")


@register
def kvcmas_origin() -> Recipe:
    return replace(kvcmas(), name="kvcmas-origin", paper="KVCMAS's ablation", reference=Origin(),
                   summary="KVCMAS from what the first exact owner made, never replaced.")


@register
def random() -> Recipe:
    return Recipe("random", "Recompute random rows: the control of every selection.", "-", Chained(),
                  selector=RandomRows(share=0.15))


@register
def shift() -> Recipe:
    return Recipe("shift", "Add the mean offset of the edge: the cheapest correction.", "ours, baseline",
                  Origin(), Affine(rank=0), lead_rows=4)


@register
def affine() -> Recipe:
    return Recipe("affine", "Correct every row by a linear map of its own key and value, learned online.", "ours",
                  Origin(), Affine(), gate=Residual(), lead_rows=4)


@register
def hybrid() -> Recipe:
    return Recipe("hybrid", "The same, and the first tenth of every text recomputed (8 to 64 rows).", "ours",
                  Origin(), Affine(), Leading(share=0.1, min_rows=8, max_rows=64), Residual(), lead_rows=4)


@register
def hybrid_attended() -> Recipe:
    base = hybrid()
    return replace(base, name="hybrid-attended", selector=Union((base.selector, QueryAttention(share=0.2))),
                   summary="Hybrid, and the fifth of the rows that the agent's own text attends to most.")


@register
def oracle() -> Recipe:
    return Recipe("oracle", "Add the true offset: the upper bound of every correction; not a method.", "-",
                  Chained(), Oracle())
