"""Change one field of a recipe by name: ``selector.share=0.2``, as the command line's ``--set`` does."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvbaton.errors import UnknownName, UsageError
from kvbaton.recipes import Recipe

PARTS = ("reference", "corrector", "selector", "gate")
_FIXED = ("name", "summary", "paper")


@dataclass(frozen=True)
class Setting:
    """A field that can be overridden: its dotted name, its type in words and its present value."""

    name: str
    kind: str
    value: object


def override(recipe: Recipe, setting: str) -> Recipe:
    """``recipe`` with one field changed, checked against the dataclass that owns it.

    ``setting``: ``part.field=value`` (part: reference, corrector, selector or gate) or ``field=value`` for a field of
    the recipe itself. Raises UnknownName with the nearest field, UsageError on a value of the wrong type or range.
    """
    name, equals, text = setting.partition("=")
    name = name.strip()
    if not equals or not name:
        raise UsageError(f"cannot read the setting {setting!r}: write part.field=value, for example selector.share=0.2")
    known = {known.name for known in settings(recipe)}
    if name not in known:
        raise UnknownName(f"setting of {recipe.name!r}", name, known)
    part, dot, field = name.partition(".")
    owner: Any
    owner, field = (getattr(recipe, part), field) if dot else (recipe, name)
    changed = replace(owner, **{field: _value(owner, name, field, text.strip())})
    overridden: Recipe = replace(recipe, **{part: changed}) if dot else changed
    return overridden


def override_all(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """`override` with each of ``settings``, in order."""
    for setting in settings:
        recipe = override(recipe, setting)
    return recipe


def settings(recipe: Recipe) -> Iterator[Setting]:
    """Every field of ``recipe`` and its parts that `override` can change."""
    for owner, prefix in ((recipe, ""), *((getattr(recipe, part), f"{part}.") for part in PARTS)):
        if not is_dataclass(owner):
            continue
        hints = get_type_hints(type(owner))
        for field in fields(owner):
            if field.init and field.name not in _FIXED and _can_parse(hints[field.name]):
                yield Setting(prefix + field.name, _in_words(hints[field.name]), getattr(owner, field.name))


def _value(owner: object, name: str, field: str, text: str) -> Any:
    """``text`` as the type of ``owner``'s ``field``."""
    kind = get_type_hints(type(owner))[field]
    try:
        return _parse(kind, text)
    except ValueError:
        raise UsageError(f"{name} wants {_in_words(kind)}, got {text!r}") from None


def _choices(kind: Any) -> tuple[Any, ...]:
    """The members of a union, the kind itself otherwise."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _can_parse(kind: Any) -> bool:
    return all(one in (int, float, bool, str, types.NoneType) or (isinstance(one, type) and issubclass(one, Enum))
               for one in _choices(kind))


def _in_words(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "none"}
    return " or ".join(words[one] if one in words else " or ".join(str(member.value) for member in one)
                       for one in _choices(kind))


def _parse(kind: Any, text: str) -> Any:
    """``text`` as ``kind``; ValueError if it is none of its choices."""
    for one in sorted(_choices(kind), key=lambda one: one is str):
        try:
            return _parse_one(one, text)
        except ValueError:
            continue
    raise ValueError(text)


def _parse_one(kind: Any, text: str) -> Any:
    if kind is types.NoneType or kind is bool:
        words = {"none": None} if kind is types.NoneType else {"true": True, "false": False}
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]
    if issubclass(kind, Enum):
        return next((member for member in kind if str(member.value) == text), None) or kind(text)
    value = kind(text)
    if isinstance(value, float) and value != value:
        raise ValueError(text)
    return value
