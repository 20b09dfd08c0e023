"""`--set part.field=value`: typed, checked against the dataclass, with the nearest name on a slip."""

from __future__ import annotations

import pytest

from kvbaton.errors import UnknownName, UsageError
from kvbaton.overrides import override, override_all, settings
from kvbaton.recipes import Mask, PrivateText, Recipe
from kvbaton.references import Chained, Isolated
from kvbaton.selectors.deviation import Deviation, Measure
from kvbaton.selectors.leading import Leading
from kvbaton.selectors.relay import Relay

BLEND = Recipe("blend", "", "", Isolated(), selector=Deviation())


def test_floats_ints_bools_and_enums_are_read_as_their_type() -> None:
    changed = override_all(BLEND, ["selector.share=0.2", "selector.check_layer = 2", "selector.measure=key",
                                   "reference.writer=true", "lead_rows=4", "private=stale", "mask=bottom-right",
                                   "hop_fallback=True"])
    assert changed.selector == Deviation(share=0.2, check_layer=2, measure=Measure.KEY)
    assert changed.reference == Isolated(writer=True)
    assert (changed.lead_rows, changed.private, changed.mask) == (4, PrivateText.STALE, Mask.BOTTOM_RIGHT)
    assert changed.hop_fallback is True
    assert Deviation() == BLEND.selector, "the original is untouched"


def test_optional_fields_take_a_value_or_none() -> None:
    relay = Recipe("relay", "", "", Chained(), selector=Relay())
    assert override(relay, "selector.last=20").selector == Relay(last=20)
    assert override(override(relay, "selector.last=20"), "selector.last=none").selector == Relay()


@pytest.mark.parametrize(("setting", "nearest"), [
    ("selector.shar=0.2", "selector.share"), ("selektor.share=0.2", "selector.share"), ("lead_row=1", "lead_rows"),
])
def test_an_unknown_field_names_the_nearest(setting: str, nearest: str) -> None:
    with pytest.raises(UnknownName) as error:
        override(BLEND, setting)
    assert error.value.nearest == nearest


@pytest.mark.parametrize("setting", ["name=other", "selector=Leading", "gate.threshold=1", "selector._x=1"])
def test_what_is_not_a_setting_is_refused(setting: str) -> None:
    with pytest.raises(UnknownName):
        override(BLEND, setting)


@pytest.mark.parametrize(("setting", "says"), [
    ("selector.share=lots", "a number"), ("selector.check_layer=1.5", "a whole number"),
    ("selector.measure=size", "value or key"), ("reference.writer=1", "true or false"),
    ("selector.share=nan", "a number"),
    ("selector.share", "part.field=value"), ("=3", "part.field=value"), ("selector.share=", "a number"),
])
def test_a_value_of_the_wrong_type_says_what_is_wanted(setting: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        override(BLEND, setting)


def test_the_dataclass_still_checks_ranges() -> None:
    with pytest.raises(UsageError, match="ratio"):
        override(BLEND, "selector.share=1.5")
    with pytest.raises(UsageError, match="one of the two"):
        override(Recipe("epic", "", "", Isolated(), selector=Leading(rows=16)), "selector.share=0.1")


def test_settings_lists_names_types_and_values() -> None:
    found = {setting.name: setting for setting in settings(BLEND)}
    assert found["selector.share"].value == 0.15
    assert found["selector.measure"].kind == "value or key"
    assert "name" not in found
