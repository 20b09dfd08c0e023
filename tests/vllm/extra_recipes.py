"""Recipes for comparing engines: gates open, so that a random model takes the reuse path. Both sides `add` them."""

from __future__ import annotations

from dataclasses import replace

from kvbaton import recipes
from kvbaton.correctors.affine import Affine
from kvbaton.gates import Always
from kvbaton.recipes import Recipe, recipe, register
from kvbaton.references import Chained, Origin
from kvbaton.selectors.leading import Leading


def moved() -> Recipe:
    return Recipe("moved", "No correction, four lead rows.", "-", Origin(), lead_rows=4)


def mapped() -> Recipe:
    return Recipe("mapped", "Affine, four lead rows.", "-", Origin(), Affine(skip_rows=4), lead_rows=4)


def mapped_leading() -> Recipe:
    return Recipe("mapped-leading", "Affine, a fifth of the rows computed.", "-", Origin(), Affine(),
                  Leading(share=0.2, min_rows=4), lead_rows=4)


def chained_mapped() -> Recipe:
    return Recipe("chained-mapped", "Affine from the agent before, learned from approximate sources too.", "-",
                  Chained(), Affine(rank=None), learn_approximate=True)


def hybrid_open() -> Recipe:
    return replace(recipe("hybrid"), name="hybrid-open", gate=Always())


def kvcmas_open() -> Recipe:
    return replace(recipe("kvcmas"), name="kvcmas-open", gate=Always())


EXTRA = (moved, mapped, mapped_leading, chained_mapped, hybrid_open, kvcmas_open)


def add() -> None:
    """Register them all, for this process."""
    for factory in EXTRA:
        register(factory)


def remove() -> None:
    """Take them out again: other tests look at the whole table."""
    for factory in EXTRA:
        recipes._FACTORIES.pop(factory.__name__.replace("_", "-"))
