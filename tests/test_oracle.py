"""Oracle: the truth, or the best of a rank on the way to it."""

from __future__ import annotations

import pytest
import torch

from kvbaton.correctors.oracle import Oracle
from kvbaton.correctors.pool import rows_of
from kvbaton.errors import InvariantError, UsageError
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Place
from toys import kv, shifted

WIDE = Geometry(3, 2, 8, torch.float32)


def told(rank: int | None, source: KV, truth: KV) -> KV:
    oracle = Oracle(rank)
    state = oracle.reveal(truth, source)
    assert oracle.can_correct(state, source)
    layers = [oracle.correct(state, source, Place(0, len(source)))(layer) for layer in range(len(source.k))]
    return KV(torch.stack([k for k, _ in layers]), torch.stack([v for _, v in layers]), 0, "b", False)


def test_full_rank_is_the_truth() -> None:
    source = kv(20, 0, WIDE)
    truth = shifted(source, kv(20, 1, WIDE))
    for rank in (None, 16, 99):
        found = told(rank, source, truth)
        torch.testing.assert_close(found.k, truth.k, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.v, truth.v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_rank_keeps_the_best_offset_of_that_rank(rank: int) -> None:
    source = kv(20, 0, WIDE)
    truth = shifted(source, kv(20, 1, WIDE))
    found = told(rank, source, truth)
    for ours, true, start in ((found.k, truth.k, source.k), (found.v, truth.v, source.v)):
        left, wanted = rows_of(ours) - rows_of(start), rows_of(true) - rows_of(start)
        assert (torch.linalg.matrix_rank(left, rtol=1e-3) == rank).all()
        best = torch.linalg.svdvals(wanted)[:, rank:].square().sum(-1).sqrt()
        assert ((left - wanted).norm(dim=(1, 2)) <= best * 1.05).all()
    torch.testing.assert_close(found.k[0], source.k[0], rtol=1e-5, atol=1e-6)


def test_knows_nothing_until_it_is_told() -> None:
    oracle, source = Oracle(), kv(5, 0)
    assert oracle.needs_truth
    assert not oracle.can_correct(oracle.new_state(source.geometry), source)
    assert not oracle.can_correct(None, source)
    with pytest.raises(InvariantError, match="not of one text"):
        oracle.reveal(kv(6, 0), source)
    with pytest.raises(UsageError, match="rank"):
        Oracle(0)
