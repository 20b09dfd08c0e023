"""A method looks the same in every plot of a report."""

from __future__ import annotations

import re

from kvbaton.bench.plots import Dot, pareto
from kvbaton.recipes import names


def colours(*methods: str) -> dict[str, str]:
    """The colour of each method's dot, found where it stands alone in a plot of equal neighbours."""
    svg = pareto([Dot(name, i + 1.0, i + 1.0, i + 0.5, i + 1.5) for i, name in enumerate(methods)], "x", "y", "t")
    found = re.findall(r"stroke: (var\(--c\d\)); stroke-opacity: 0\.6", svg)
    return dict(zip(methods, found, strict=True))


def test_a_method_keeps_its_colour_in_any_company() -> None:
    alone, among = colours("hybrid"), colours("dense", "kvcmas", "hybrid", "oracle")
    assert alone["hybrid"] == among["hybrid"]
    assert colours(*reversed(names())) == dict(reversed(colours(*names()).items()))


def test_variants_of_a_method_are_told_apart() -> None:
    assert len(set(colours("hybrid (lead_rows=0)", "hybrid (lead_rows=4)", "hybrid (lead_rows=8)").values())) == 3
