"""The study's methods: recipes without their gates, so that every row measures the correction and nothing else."""

from __future__ import annotations

from dataclasses import replace

from kvbaton.correctors.affine import Affine
from kvbaton.correctors.blocks import Heads, Inputs
from kvbaton.gates import Always
from kvbaton.recipes import PrivateText, Recipe, names, recipe
from kvbaton.references import Isolated
from kvbaton.selectors.correction import CorrectionSize
from kvbaton.selectors.leading import Leading


def _changed(base: str, **fields: object) -> Recipe:
    return replace(recipe(base), gate=Always(), **fields)  # type: ignore[arg-type]


def _affine(**fields: object) -> Recipe:
    return _changed("affine", corrector=replace(Affine(), **fields))  # type: ignore[arg-type]


def methods() -> dict[str, Recipe]:
    """By name. A name with a suffix is a recipe of that name with one thing changed."""
    table = {
        "full-shared": _changed("full-shared"),
        "full-shared+4": _changed("full-shared", lead_rows=4),
        "first": _changed("full-shared", selector=Leading(share=0.1, min_rows=8, max_rows=64), lead_rows=4),
        "first-4": _changed("full-shared", selector=Leading(share=0.1, min_rows=4), lead_rows=4),
        "shift": _changed("shift"),
        "affine": _changed("affine"),
        "affine+0": _changed("affine", lead_rows=0),
        "hybrid": _changed("hybrid"),
        "hybrid-4": _changed("hybrid", selector=Leading(share=0.1, min_rows=4, max_rows=64)),
        "hybrid-20": _changed("hybrid", selector=Leading(share=0.2, min_rows=4)),
        "hybrid-size": _changed("hybrid", selector=CorrectionSize(share=0.1)),
        "hybrid-size-20": _changed("hybrid", selector=CorrectionSize(share=0.2)),
        "affine-full": _affine(rank=None),
        "affine-r8": _affine(rank=8),
        "affine-r16": _affine(rank=16),
        "affine-alone-r8": _affine(rank=8, heads=Heads.PER_HEAD),
        "affine-alone-r32": _affine(rank=32, heads=Heads.PER_HEAD),
        "affine-split": _affine(rank=None, inputs=Inputs.SPLIT),
        "affine-skip4": _affine(skip_rows=4),
        "affine-p0": _affine(decay=0.0),
        "affine-p1": _affine(decay=1.0),
        "affine-l100": _affine(ridge_tokens=100.0),
        "affine-l250": _affine(ridge_tokens=250.0),
        "affine-l1000": _affine(ridge_tokens=1000.0),
        "affine-l2000": _affine(ridge_tokens=2000.0),
        "affine-prior0": _affine(offset_prior=0.0),
        "affine-prior1": _affine(offset_prior=1.0),
    }
    for name in {"cacheblend", "relaycaching", "epic", "prophetkv", "kvcmas", "kvcmas-origin", "kvcomm"} & set(names()):
        table[name] = _changed(name)
        table[f"{name}+4"] = _changed(name, lead_rows=4)
    return table


def fed_by_pairs(method: Recipe) -> bool:
    """Whether what it learns is the plain pair of source and target, so that one dense pass serves all such methods."""
    return not isinstance(method.reference, Isolated) and method.private is PrivateText.EXACT
