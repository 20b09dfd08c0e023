"""A correction of a segment's first rows only: the hop is the one of a correction that also returns the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import tiny
from hops import ANSWER
from kvbaton.correctors.base import Correction, LayerKV, joined, parts
from kvbaton.engine.result import HopResult
from kvbaton.engine.session import Session
from kvbaton.kv import KV
from kvbaton.prompt import Place
from kvbaton.recipes import recipe
from kvbaton.references import RunStore
from kvbaton.selectors.base import NoRows, Selector
from kvbaton.selectors.correction import CorrectionSize
from kvbaton.selectors.deviation import Deviation
from toys import MeanOffset

NEAR = 7
"""Rows that are corrected."""


@dataclass(frozen=True)
class NearRows(MeanOffset):
    """The mean offset for the first rows; the others are not returned."""

    def correct(self, state: Any, source: KV, place: Place) -> Correction:
        return super().correct(state, source.rows(0, NEAR), place)


@dataclass(frozen=True)
class AllReturned(NearRows):
    """The same with the others returned as the source has them."""

    def correct(self, state: Any, source: KV, place: Place) -> Correction:
        near = super().correct(state, source, place)

        def layer(at: int) -> LayerKV:
            (k, v), rest = near(at), source.rows(NEAR, len(source))
            return torch.cat((k, rest.k[at]), 1), torch.cat((v, rest.v[at]), 1)

        return layer


def last_hop(corrector: MeanOffset, selector: Selector) -> tuple[HopResult, KV]:
    """The third agent's hop of a second run, and the KV that it leaves of the text."""
    chosen = replace(recipe("full-shared"), corrector=corrector, selector=selector)
    with Session(tiny.engine(), chosen) as session:
        for seed in (1, 2):
            store: RunStore = session.start_run()
            for reader, system in (("solver", 9), ("critic", 14), ("judge", 11)):
                prompt = tiny.prompt(reader, (None, tiny.ids(system, system)), ("question", tiny.ids(20, seed)),
                                     (None, tiny.ids(5, 9)))
                hop = session.hop(prompt, ANSWER, store)
        assert [decision.action for decision in hop.decisions] == ["correct"]
        held = store.get(prompt.segments[1])
        assert held is not None
        return hop, held


@pytest.mark.parametrize("selector", [NoRows(), CorrectionSize(share=0.2), Deviation(share=0.2)])
def test_rows_that_a_corrector_does_not_return_stay_as_the_source_has_them(selector: Selector) -> None:
    (near, held), (whole, all_held) = (last_hop(corrector, selector) for corrector in (NearRows(), AllReturned()))
    assert near.logits is not None
    assert whole.logits is not None
    assert torch.equal(near.logits, whole.logits)
    assert near.moved_bytes == whole.moved_bytes
    assert torch.equal(held.k, all_held.k)
    assert torch.equal(held.v, all_held.v)


def test_only_rows_that_are_returned_count_as_corrected() -> None:
    (near, _), (whole, _) = (last_hop(corrector, NoRows()) for corrector in (NearRows(), AllReturned()))
    layers = tiny.engine().geometry.layers
    assert near.entries.corrected == NEAR * (layers - 1)
    assert whole.entries.corrected == 20 * (layers - 1)
    assert near.entries.total == whole.entries.total
    assert near.effective_reuse_ratio == whole.effective_reuse_ratio


def test_parts_follow_each_other_and_the_sources_are_not_copied() -> None:
    source = KV(torch.randn(3, 2, 9, 4), torch.randn(3, 2, 9, 4), 0, "a", True)

    def near(layer: int) -> LayerKV:
        return source.k[layer, :, :4] + 1, source.v[layer, :, :4] - 1

    first, rest = parts(near, source, 2)
    assert torch.equal(first[0], source.k[2, :, :4] + 1)
    assert rest[0].data_ptr() == source.k[2, :, 4:].data_ptr()
    k, v = joined([first, rest])
    assert torch.equal(k, torch.cat((source.k[2, :, :4] + 1, source.k[2, :, 4:]), 1))
    assert torch.equal(v, torch.cat((source.v[2, :, :4] - 1, source.v[2, :, 4:]), 1))
    assert parts(lambda layer: (source.k[layer], source.v[layer]), source, 1)[0][0].data_ptr() == source.k[1].data_ptr()
