"""The fast attention against its plain reference, for any set of rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.engine.attention import AttentionCall, QueryRows, attend, attend_plain, attention_mass


@given(st.sets(st.integers(0, 900), min_size=1, max_size=60), st.sampled_from([None, 1, 7, 200]), st.booleans(),
       st.sampled_from([1, 2, 4]))
def test_scattered_rows_match_the_plain_reference(positions, window, bottom_right, kv_heads):
    rows = QueryRows(torch.tensor(sorted(positions)), bottom_right)
    check(rows, AttentionCall(0.3, window), kv_heads, slots=910)


@given(st.integers(0, 300), st.integers(1, 600), st.sampled_from([None, 50, 2000]))
def test_contiguous_runs_match_the_plain_reference(start, count, window):
    check(QueryRows(torch.arange(start, start + count)), AttentionCall(0.3, window), 2, slots=start + count + 5)


def check(rows, call, kv_heads, slots):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, rows.positions.numel(), 8, generator=generator)
    k, v = (torch.randn(kv_heads, slots, 8, generator=generator) for _ in range(2))
    assert torch.allclose(attend(q, k, v, rows, call), attend_plain(q, k, v, rows, call), atol=1e-5)


def test_no_row_sees_a_key_behind_its_position():
    rows = QueryRows(torch.tensor([2, 5, 9]))
    q, k, v = torch.randn(2, 3, 8), torch.randn(2, 12, 8), torch.randn(2, 12, 8)
    before = attend(q, k, v, rows, AttentionCall(0.5))
    k[:, 6:], v[:, 6:] = 9.0, 9.0
    after = attend(q, k, v, rows, AttentionCall(0.5))
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])


def test_attention_mass_sums_to_rows_times_heads():
    rows = QueryRows(torch.tensor([2, 5, 9]))
    mass = attention_mass(torch.randn(4, 3, 8), torch.randn(2, 12, 8), rows, AttentionCall(0.5), queries=2)
    assert mass.shape == (10,)
    assert abs(float(mass.sum()) - 2 * 4) < 1e-4
