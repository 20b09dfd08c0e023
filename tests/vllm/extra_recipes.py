"""Recipes for comparing engines: every gate open, so that a random model takes the reuse path. Both sides import it."""

from __future__ import annotations

from dataclasses import replace

from kvbaton.correctors.affine import Affine
from kvbaton.gates import Always
from kvbaton.recipes import Recipe, recipe, register
from kvbaton.references import Chained, Origin
from kvbaton.selectors.leading import Leading


@register
def moved() -> Recipe:
    return Recipe("moved", "No correction, four lead rows.", "-", Origin(), lead_rows=4)


@register
def mapped() -> Recipe:
    return Recipe("mapped", "Affine, four lead rows.", "-", Origin(), Affine(skip_rows=4), lead_rows=4)


@register
def mapped_leading() -> Recipe:
    return Recipe("mapped-leading", "Affine, a fifth of the rows computed.", "-", Origin(), Affine(),
                  Leading(share=0.2, min_rows=4), lead_rows=4)


@register
def chained_mapped() -> Recipe:
    return Recipe("chained-mapped", "Affine from the agent before, learned from approximate sources too.", "-",
                  Chained(), Affine(rank=None), learn_approximate=True)


@register
def hybrid_open() -> Recipe:
    return replace(recipe("hybrid"), name="hybrid-open", gate=Always())


@register
def kvcmas_open() -> Recipe:
    return replace(recipe("kvcmas"), name="kvcmas-open", gate=Always())
