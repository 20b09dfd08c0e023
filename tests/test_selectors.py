"""Selectors on synthetic tensors: what each chooses, and what all of them must keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbaton.errors import UsageError
from kvbaton.selectors.attention import QueryAttention
from kvbaton.selectors.base import AllRows, Compared, LayerView, Need, NoRows, ReusedRows, Selector
from kvbaton.selectors.budget import best, rows_of
from kvbaton.selectors.combine import Split, Union
from kvbaton.selectors.deviation import Deviation, Measure
from kvbaton.selectors.layers import LayerBlock
from kvbaton.selectors.leading import Leading
from kvbaton.selectors.random import RandomRows
from kvbaton.selectors.relay import Relay

LAYERS = 6


def reused(*lengths: int, first_offset: int = 0) -> ReusedRows:
    """Segments of ``lengths`` tokens, two private tokens before each."""
    positions, offsets, segments, at = [], [], [], 0
    for i, tokens in enumerate(lengths):
        at += 2
        for offset in range(first_offset, tokens):
            positions.append(at + offset)
            offsets.append(offset)
            segments.append(2 * i + 1)
        at += tokens
    attention = torch.arange(len(positions), dtype=torch.float32).flip(0)
    return ReusedRows(torch.tensor(positions, dtype=torch.int64), torch.tensor(offsets, dtype=torch.int64),
                      torch.tensor(segments, dtype=torch.int64), LAYERS, attention=attention)


class Layer:
    """Fresh and reused KV of n rows, ``[H, n, D]``; a view shows the active ones."""

    def __init__(self, n: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.fresh_k, self.fresh_v, self.reused_k, self.reused_v = (torch.randn(2, n, 4, generator=g) for _ in range(4))
        self.attention = torch.rand(n, generator=g)

    def view(self, rows: Tensor) -> LayerView:
        parts = (self.fresh_k, self.fresh_v, self.reused_k, self.reused_v)
        return LayerView(rows, lambda: Compared(*(part[:, rows] for part in parts)), lambda queries: self.attention)


def trace(selector: Selector, rows: ReusedRows) -> list[Tensor]:
    """Active rows of every layer; checks what every selector must keep."""
    selection = selector.begin(rows)
    active = [selection.start()]
    for layer in range(rows.layers):
        after = selection.after(layer, Layer(len(rows), seed=layer).view(active[-1]))
        if layer + 1 < rows.layers:
            active.append(after)
    for layer, chosen in enumerate(active):
        assert chosen.dtype == torch.int64
        assert torch.equal(chosen, torch.unique(chosen)), "sorted, unique"
        assert chosen.numel() == 0 or (chosen[0] >= 0 and chosen[-1] < len(rows))
        if layer and layer != selector.entry:
            assert torch.isin(chosen, active[layer - 1]).all(), "rows enter at the entry layer only"
    return active


def counts(selector: Selector, rows: ReusedRows) -> list[int]:
    return [chosen.numel() for chosen in trace(selector, rows)]


BUDGETED: dict[str, Callable[[float], Selector]] = {
    "leading": lambda share: Leading(share=share),
    "random": lambda share: RandomRows(share=share),
    "deviation": lambda share: Deviation(share=share),
    "deviation-key": lambda share: Deviation(share=share, measure=Measure.KEY, check_layer=0),
    "deviation-gradual": lambda share: Deviation(share=share, gradual=1.5),
    "relay": lambda share: Relay(0, 2, None, share=share),
    "attention": lambda share: QueryAttention(share=share),
    "union": lambda share: Union((QueryAttention(share=share), Deviation(share=share))),
    "split": lambda share: Split((QueryAttention(share=share / 2), Deviation(share=share / 2))),
}


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("lengths", [(1,), (7,), (16, 33), (5, 1, 40)])
def test_zero_budget_computes_nothing_and_full_budget_everything(name: str, lengths: tuple[int, ...]) -> None:
    rows = reused(*lengths)
    assert counts(BUDGETED[name](0.0), rows) == [0] * LAYERS
    assert counts(BUDGETED[name](1.0), rows) == [len(rows)] * LAYERS


@pytest.mark.parametrize("name", BUDGETED)
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), share=st.floats(0.0, 1.0))
def test_every_selector_keeps_the_rules(name: str, lengths: list[int], share: float) -> None:
    trace(BUDGETED[name](share), reused(*lengths))


@pytest.mark.parametrize("selector", [RandomRows(0.13), QueryAttention(0.13), Deviation(0.13), Relay(0, 1, share=0.13),
                                      Split((RandomRows(0.06), Deviation(0.07)))])
def test_a_share_is_met_exactly_above_the_check(selector: Selector) -> None:
    rows = reused(60, 41)
    assert counts(selector, rows)[2:] == [rows_of(0.13, 101)] * (LAYERS - 2)


def test_no_reused_row_at_all() -> None:
    for make in BUDGETED.values():
        assert counts(make(0.5), reused()) == [0] * LAYERS


def test_null_parts() -> None:
    assert counts(NoRows(), reused(9)) == [0] * LAYERS
    assert counts(AllRows(), reused(9)) == [9] * LAYERS


def test_leading_takes_the_first_rows_of_every_segment() -> None:
    rows = reused(20, 3, 100)
    by_share = trace(Leading(share=0.1, min_rows=4, max_rows=8), rows)[0]
    assert rows.offsets[by_share].tolist() == [0, 1, 2, 3, 0, 1, 2, *range(8)]
    by_count = trace(Leading(rows=16), rows)[0]
    assert rows.offsets[by_count].tolist() == [*range(16), 0, 1, 2, *range(16)]


def test_leading_counts_rows_that_are_exact_already() -> None:
    rows = reused(40, first_offset=4)
    assert rows.offsets[trace(Leading(share=0.2), rows)[0]].tolist() == [4, 5, 6, 7]
    assert counts(Leading(rows=4), rows)[0] == 0


def test_random_rows_repeat_with_the_seed_only() -> None:
    rows = reused(200)
    one, same, other = (trace(RandomRows(0.1, seed), rows)[0] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("measure", list(Measure))
def test_deviation_takes_what_changed_most_at_the_check_layer(measure: Measure) -> None:
    rows = reused(30)
    selection = Deviation(share=0.1, check_layer=1, measure=measure).begin(rows)
    layer = Layer(30)
    fresh, held = ((layer.fresh_v, layer.reused_v) if measure is Measure.VALUE else (layer.fresh_k, layer.reused_k))
    changed = torch.tensor([4, 11, 29])
    quiet = torch.ones(30, dtype=torch.bool).index_fill(0, changed, False)
    fresh[:, quiet] = held[:, quiet] + 1e-3
    assert selection.after(0, layer.view(selection.start())).numel() == 30
    assert torch.equal(selection.after(1, layer.view(rows.all())), changed)
    assert torch.equal(selection.after(2, layer.view(changed)), changed)


def test_gradual_filtering_falls_and_keeps_the_mean() -> None:
    above = counts(Deviation(share=0.2, gradual=1.5), reused(200))[2:]
    assert above == sorted(above, reverse=True)
    assert (above[0], above[-1]) == (60, 20)
    assert sum(above) == 40 * len(above)


def test_layer_block_is_every_row_inside_and_none_outside() -> None:
    block = LayerBlock(2, 3)
    assert counts(block, reused(5, 4)) == [0, 0, 9, 9, 0, 0]
    assert block.entry == 2
    assert Need.HIDDEN_AT_ENTRY in block.needs
    from_zero = LayerBlock(0, LAYERS - 1)
    assert counts(from_zero, reused(5)) == [5] * LAYERS
    assert (from_zero.entry, from_zero.needs) == (None, frozenset())


def test_relay_zones() -> None:
    relay = Relay(first=1, detect=2, last=4, share=0.2)
    assert counts(relay, reused(20)) == [0, 20, 20, 4, 4, 0]
    assert relay.entry == 1
    assert relay.needs == {Need.QUERY_ATTENTION, Need.HIDDEN_AT_ENTRY}


def test_relay_thresholds_choose_deviating_and_attended_rows() -> None:
    rows = reused(10)
    selection = Relay(0, 0, None).begin(rows)
    layer = Layer(10)
    layer.fresh_v = layer.reused_v + 0.01
    layer.fresh_v[:, 3] = -layer.reused_v[:, 3]
    layer.attention = torch.full((10,), 0.1).index_fill(0, torch.tensor([7]), 0.9)
    assert selection.after(0, layer.view(rows.all())).tolist() == [3, 7]


def test_relay_with_equal_rows_chooses_none() -> None:
    rows = reused(10)
    layer = Layer(10)
    layer.fresh_v, layer.attention = layer.reused_v, torch.zeros(10)
    assert Relay(0, 0, None).begin(rows).after(0, layer.view(rows.all())).numel() == 0


def test_query_attention_takes_the_most_attended() -> None:
    assert trace(QueryAttention(0.2), reused(10))[0].tolist() == [0, 1]


def test_union_is_the_union() -> None:
    rows = reused(20, 20)
    union = Union((Leading(rows=2), QueryAttention(0.1)))
    assert trace(union, rows)[3].tolist() == [0, 1, 2, 3, 20, 21]


def test_split_spends_each_share_on_other_rows() -> None:
    rows = reused(100)
    active = trace(Split((QueryAttention(0.05), RandomRows(0.1), Deviation(0.1))), rows)
    assert [a.numel() for a in active] == [100, 100, 25, 25, 25, 25]
    assert torch.isin(torch.arange(5), active[-1]).all()


def test_split_wants_the_late_chooser_last() -> None:
    with pytest.raises(UsageError, match="put it last"):
        Split((Deviation(0.1), QueryAttention(0.1))).begin(reused(30))


@pytest.mark.parametrize("build", [
    lambda: Leading(), lambda: Leading(share=0.1, rows=2), lambda: Leading(rows=-1), lambda: Leading(share=1.5),
    lambda: RandomRows(-0.1), lambda: Deviation(share=2), lambda: Deviation(check_layer=-1),
    lambda: Deviation(gradual=0.5), lambda: Relay(3, 2), lambda: Relay(queries=0), lambda: LayerBlock(4, 2),
    lambda: QueryAttention(1.01), lambda: Union((LayerBlock(1, 2), LayerBlock(2, 3))),
    lambda: Split((RandomRows(0.7), QueryAttention(0.7))),
])
def test_impossible_settings_are_refused(build: Callable[[], Selector]) -> None:
    with pytest.raises(UsageError):
        build()


@pytest.mark.parametrize("selector", [LayerBlock(1, LAYERS), Deviation(check_layer=LAYERS), Relay(0, LAYERS)])
def test_layers_beyond_the_model_are_refused(selector: Selector) -> None:
    with pytest.raises(UsageError, match="layer"):
        selector.begin(reused(10))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.data())
def test_best_against_a_plain_reference(scores: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(scores)))
    plain = sorted(sorted(range(len(scores)), key=lambda i: (-torch.tensor(scores[i]).item(), i))[:count])
    assert best(torch.tensor(scores), count).tolist() == plain
