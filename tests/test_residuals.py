"""Residuals: the stored offset gives back the target; what is not stored changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.correctors.residuals import Residuals, ResidualState, Sparse
from kvbaton.errors import StoreError, UsageError
from kvbaton.gates import ExactKey
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Place

L, H, T, D = 3, 2, 5, 4
GEOMETRY = Geometry(L, H, D, torch.float32)


def pair(ids: tuple[int, ...] = (1, 2, 3, 4, 5), seed: int = 0) -> tuple[KV, KV]:
    """A source and its target; layer 0 is equal, as it is in a model."""
    g = torch.Generator().manual_seed(seed)
    k, v, dk, dv = (torch.randn(L, H, len(ids), D, generator=g) for _ in range(4))
    dk[0] = dv[0] = 0
    source = KV(k, v, 0, "(alone)", True, token_ids=ids)
    return source, KV(k + dk, v + dv, 40, "critic", True)


def learned(corrector: Residuals, *seen: tuple[int, ...]) -> ResidualState:
    source, _ = pair()
    state = corrector.new_state(source.geometry)
    for ids in seen:
        corrector.learn(state, *pair(ids))
        state.check()
    return state


def test_full_residual_gives_back_the_target_and_leaves_the_source() -> None:
    source, target = pair()
    before = source.k.clone()
    corrector = Residuals(sightings=1)
    state = learned(corrector, source.token_ids)
    assert corrector.can_correct(state, source)
    correction = corrector.correct(state, source, Place(40, len(source)))
    for layer in range(L):
        k, v = correction(layer)
        torch.testing.assert_close(k, target.k[layer], rtol=0, atol=1e-6)
        torch.testing.assert_close(v, target.v[layer], rtol=0, atol=1e-6)
    assert torch.equal(source.k, before)


@settings(max_examples=20, deadline=None)
@given(drop=st.floats(0, 0.99), seed=st.integers(0, 99))
def test_sparse_keeps_the_largest_entries(drop: float, seed: int) -> None:
    offset = torch.randn(2, H, T, D, generator=torch.Generator().manual_seed(seed))
    sparse = Sparse.of(offset, drop)
    for layer in (1, 2):
        flat = offset[layer - 1].flatten()
        kept = sorted(range(flat.numel()), key=lambda i: -abs(flat[i].item()))[:flat.numel() - int(drop * flat.numel())]
        plain = torch.zeros_like(flat)
        plain[kept] = flat[kept]
        assert torch.equal(sparse.add_to(torch.zeros(H, T, D), layer).flatten(), plain)


def test_sparse_saves_bytes() -> None:
    source, target = pair(tuple(range(64)))
    full, thin = Residuals(1), Residuals(1, drop_k=0.75, drop_v=0.7)
    states = [c.new_state(source.geometry) for c in (full, thin)]
    for corrector, state in zip((full, thin), states, strict=True):
        corrector.learn(state, source, target)
    assert states[1].nbytes < 0.35 * states[0].nbytes


def test_a_relation_is_stored_after_enough_sightings_of_the_same_ids() -> None:
    corrector = Residuals(sightings=2)
    source, _ = pair()
    assert not corrector.can_correct(learned(corrector, source.token_ids), source)
    assert not corrector.can_correct(learned(corrector, source.token_ids, (9, 2, 3, 4, 5)), source)
    assert corrector.can_correct(learned(corrector, source.token_ids, source.token_ids), source)


def test_the_gate_accepts_stored_relations_only_and_asks_to_be_taught() -> None:
    source, _ = pair()
    corrector = Residuals(sightings=2)
    for state in (None, learned(corrector, source.token_ids)):
        verdict = ExactKey().judge(state, source, 0)
        assert (verdict.accept, verdict.teach) == (False, True)
    assert ExactKey().judge(learned(corrector, *[source.token_ids] * 2), source, 0).accept


def test_capacity_forgets_what_was_seen_least() -> None:
    state = learned(Residuals(1, capacity=2), (1, 1), (1, 1), (2, 2), (3, 3))
    assert set(state.seen) == set(state.held) == {(1, 1), (3, 3)}


def test_merge_adds_sightings_and_keeps_residuals() -> None:
    one, two = learned(Residuals(1), (1, 1), (2, 2)), learned(Residuals(1), (1, 1), (3, 3))
    one.merge(two)
    assert one.seen == {(1, 1): 2, (2, 2): 1, (3, 3): 1}
    assert set(one.held) == {(1, 1), (2, 2), (3, 3)}


def test_store_round_trip() -> None:
    state = learned(Residuals(2, drop_v=0.5), (1, 2), (1, 2), (7, 8, 9))
    back = ResidualState(GEOMETRY)
    back.from_tensors(state.to_tensors())
    assert back.seen == state.seen
    assert back.nbytes == state.nbytes
    assert all(torch.equal(a.values, b.values) and torch.equal(a.at, b.at)
               for ids in state.held for a, b in zip(state.held[ids], back.held[ids], strict=True))


@pytest.mark.parametrize("break_it", [
    lambda t: t.pop("t0_seen"), lambda t: t.pop("t0_v_at"), lambda t: t["t0_k_values"].fill_(float("nan")),
    lambda t: t.update({"t0_k_at": torch.zeros(1, 1, dtype=torch.int32)}), lambda t: t["t0_k_at"].fill_(-1),
    lambda t: t["t0_v_at"].fill_(2 * H * D),
])
def test_broken_stores_are_refused(break_it: object) -> None:
    tensors = dict(learned(Residuals(1), (1, 2)).to_tensors())
    break_it(tensors)  # type: ignore[operator]
    with pytest.raises(StoreError):
        ResidualState(GEOMETRY).from_tensors(tensors)


@pytest.mark.parametrize("bad", [{"sightings": 0}, {"capacity": 0}, {"drop_k": 1.0}, {"drop_v": -0.1}])
def test_impossible_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Residuals(**bad)  # type: ignore[arg-type]
