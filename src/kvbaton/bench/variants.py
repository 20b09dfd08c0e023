"""Recipes with one field varied: ``selector.share=0.1,0.2`` makes two methods of every one that has the field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvbaton.errors import UnknownName, UsageError
from kvbaton.overrides import override, settings
from kvbaton.recipes import Recipe


def vary(recipes: Sequence[Recipe], variation: str) -> tuple[Recipe, ...]:
    """Each recipe that has the field once a value, named ``method[field=value]``; the others as they are.

    ``variation``: ``part.field=a,b,c``. Raises UnknownName if no recipe has the field, UsageError on a bad value.
    """
    field, equals, values = variation.partition("=")
    wanted = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not wanted:
        raise UsageError(f"cannot read the sweep {variation!r}: write part.field=a,b,c, such as selector.share=0.1,0.2")
    field = field.strip()
    known = {recipe.name: {setting.name for setting in settings(recipe)} for recipe in recipes}
    if not any(field in names for names in known.values()):
        raise UnknownName("setting of these methods", field, set().union(*known.values()))
    out: list[Recipe] = []
    for recipe in recipes:
        if field not in known[recipe.name]:
            out.append(recipe)
            continue
        for value in wanted:
            changed = override(recipe, f"{field}={value}")
            out.append(replace(changed, name=f"{recipe.name}[{field}={value}]"))
    return tuple(out)
