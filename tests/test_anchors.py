"""Anchors against a plain reference, and what their pool promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbaton.correctors import pool as pool_module
from kvbaton.correctors.anchors import Anchors
from kvbaton.correctors.anchors_state import AnchorState
from kvbaton.errors import StoreError, UsageError
from kvbaton.kv import KV, Geometry
from kvbaton.memory import Memory, ModelIdentity, check_file
from kvbaton.prompt import Edge, Place
from toys import GEOMETRY, kv, shifted

IDENTITY = ModelIdentity("tiny", "f00d", "rope0")
EDGE = Edge("question", "solver", "critic")
WIDE = Geometry(4, 3, 8, torch.float32)


def text(tokens: int, seed: int, geometry: Geometry = GEOMETRY, scale: float = 1.0) -> KV:
    """A source KV that knows its ids."""
    return replace(kv(tokens, seed, geometry, scale), token_ids=tuple(range(1000 * seed, 1000 * seed + tokens)))


def offset(source: KV, seed: int, scale: float = 1.0) -> KV:
    return kv(len(source), seed + 5000, source.geometry, scale)


def taught(corrector: Anchors, sources: list[KV], scale: float = 1.0) -> AnchorState:
    state = corrector.new_state(sources[0].geometry)
    for source in sources:
        corrector.learn(state, source, shifted(source, offset(source, len(source), scale)))
    return state


def corrected(corrector: Anchors, state: AnchorState, source: KV) -> tuple[Tensor, Tensor]:
    correction = corrector.correct(state, source, Place(3, len(source)))
    layers = [correction(layer) for layer in range(len(source.k))]
    return torch.stack([k for k, _ in layers]), torch.stack([v for _, v in layers])


def dense_of(state: AnchorState, side: str, kind: str) -> list[Tensor]:
    """Every text's base or offset, reconstructed: ``[L-1, S, H*D]`` each."""
    assert state.pool is not None
    stack = getattr(getattr(state.pool, side), kind)
    return [(parts["full"] if "full" in parts else parts["left"].float() @ parts["right"].float()).float()
            for parts in stack.tensors()]


def reference(corrector: Anchors, state: AnchorState, source: KV) -> tuple[Tensor, Tensor]:
    """The corrected KV by loops over rows and anchors, everything reconstructed."""
    def distances(side: str, x: Tensor) -> Tensor:
        out = torch.full((len(dense_of(state, side, "base")), x.shape[2]), torch.inf)
        for v, base in enumerate(dense_of(state, side, "base")):
            for t in range(min(base.shape[1], x.shape[2])):
                row = x[1:, :, t].flatten(1).float()
                out[v, t] = (row - base[:, t]).square().mean().sqrt()
        return out

    keep = list(range(len(state.pool or ())))
    if corrector.top_k is not None:
        means = [row[row.isfinite()].mean().item() for row in distances("k", source.k)]
        keep = sorted(sorted(keep, key=means.__getitem__)[:corrector.top_k])
    outs = []
    for side, x in (("k", source.k), ("v", source.v)):
        far, offsets, out = distances(side, x), dense_of(state, side, "offset"), x.clone()
        for t in range(x.shape[2]):
            reach = [v for v in keep if far[v, t].isfinite()]
            for v in reach:
                shares = torch.softmax(-far[reach, t] / corrector.temperature, 0)
                added = offsets[v][:, t].view(x.shape[0] - 1, x.shape[1], x.shape[3])
                out[1:, :, t] += (shares[reach.index(v)] * added).to(x.dtype)
        outs.append(out)
    return outs[0], outs[1]


@pytest.mark.parametrize("block", [1, 200, 1 << 21])
@pytest.mark.parametrize(("rank", "base_rank"), [(3, 4), (3, None), (None, 4), (None, None), (99, 99)])
@pytest.mark.parametrize("top_k", [None, 2])
def test_equals_the_plain_reference(rank: int | None, base_rank: int | None, top_k: int | None, block: int,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pool_module._BLOCK, "cpu", block)
    corrector = Anchors(rank, base_rank, top_k=top_k, temperature=0.3)
    state = taught(corrector, [text(t, t, WIDE) for t in (9, 30, 14, 5)])
    for source in (text(12, 77, WIDE), text(40, 78, WIDE), text(1, 79, WIDE)):
        for ours, wanted in zip(corrected(corrector, state, source), reference(corrector, state, source), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), tokens=st.integers(1, 24),
       rank=st.sampled_from([None, 1, 4]), temperature=st.sampled_from([0.1, 1.0]), seed=st.integers(0, 50))
def test_equals_the_plain_reference_at_any_length(lengths: list[int], tokens: int, rank: int | None,
                                                  temperature: float, seed: int) -> None:
    corrector = Anchors(rank, rank, pool=3, temperature=temperature)
    state = taught(corrector, [text(n, seed + i) for i, n in enumerate(lengths)])
    source = text(tokens, seed + 90)
    for ours, wanted in zip(corrected(corrector, state, source), reference(corrector, state, source), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    state.check()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_half_precision_is_close_to_float32(dtype: torch.dtype, tolerance: float) -> None:
    geometry = Geometry(4, 3, 8, dtype)
    sources = [text(t, t, geometry) for t in (9, 30, 14)]
    corrector = Anchors(3, 4)
    state, source = taught(corrector, sources), text(20, 77, geometry)
    for ours, wanted in zip(corrected(corrector, state, source), reference(corrector, state, source), strict=True):
        assert ours.dtype == dtype
        assert (ours - wanted).float().norm() / wanted.float().norm() < tolerance


def test_large_float16_keys_do_not_overflow() -> None:
    geometry = Geometry(4, 3, 8, torch.float16)
    corrector = Anchors(4, 4)
    state = taught(corrector, [text(30, 1, geometry, scale=300.0), text(30, 2, geometry, scale=300.0)])
    assert state.pool is not None
    assert state.pool.k.squared_distances(text(20, 3, geometry, 300.0).k).isfinite().all()
    k, v = corrected(corrector, state, text(20, 3, geometry, 300.0))
    assert k.isfinite().all()
    assert v.isfinite().all()


def test_layer_0_and_rows_behind_every_anchor_stay_as_they_are() -> None:
    corrector = Anchors(4)
    state, source = taught(corrector, [text(6, 1), text(9, 2)]), text(14, 3)
    k, v = corrected(corrector, state, source)
    assert torch.equal(k[0], source.k[0])
    assert torch.equal(v[0], source.v[0])
    assert torch.equal(k[:, :, 9:], source.k[:, :, 9:])
    assert not torch.isclose(k[1:, :, :9], source.k[1:, :, :9]).all(-1).any()
    only = taught(corrector, [text(9, 2)])
    torch.testing.assert_close(k[:, :, 6:], corrected(corrector, only, source)[0][:, :, 6:])


def test_an_equal_offset_of_every_anchor_is_added_whole_and_nothing_is_written_to() -> None:
    """KVCOMM's acceptance test 3: whatever the weights, they sum to one, for every start."""
    corrector, state = Anchors(None), Anchors(None).new_state(GEOMETRY)
    added = kv(12, 9)
    for seed in range(3):
        corrector.learn(state, text(12, seed), shifted(text(12, seed), added))
    source = text(10, 50)
    before, held = source.k.clone(), [m.clone() for m in dense_of(state, "k", "offset")]
    k, v = corrected(corrector, state, source)
    wanted = shifted(source, added.rows(0, 10))
    torch.testing.assert_close(k, wanted.k, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(v, wanted.v, rtol=1e-4, atol=1e-5)
    assert torch.equal(source.k, before)
    assert all(torch.equal(a, b) for a, b in zip(held, dense_of(state, "k", "offset"), strict=True))


def test_the_text_itself_gets_its_own_offset_back() -> None:
    corrector = Anchors(None, None, temperature=0.01)
    sources = [text(12, seed) for seed in range(4)]
    state = taught(corrector, sources)
    k, _ = corrected(corrector, state, sources[2])
    torch.testing.assert_close(k, shifted(sources[2], offset(sources[2], 12)).k, rtol=1e-3, atol=1e-3)


def test_layers_may_be_asked_for_in_any_order() -> None:
    corrector = Anchors(3)
    state, source = taught(corrector, [text(9, 1, WIDE), text(30, 2, WIDE)]), text(20, 3, WIDE)
    k, v = corrected(corrector, state, source)
    correction = corrector.correct(state, source, Place(0, len(source)))
    for layer in (3, 0, 1, 1, 2):
        assert torch.equal(correction(layer)[0], k[layer])
        assert torch.equal(correction(layer)[1], v[layer])


# --- pool --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(limit=st.integers(1, 4), window=st.integers(1, 6), seeds=st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_the_pool_is_kept_exactly_and_the_new_text_is_never_dropped(limit: int, window: int, seeds: list[int]) -> None:
    corrector = Anchors(2, 2, pool=limit, window=window)
    state, seen = corrector.new_state(GEOMETRY), set[int]()
    for seed in seeds:
        source = text(4 + seed % 3, seed)
        corrector.learn(state, source, shifted(source, offset(source, seed)))
        state.check()
        assert state.pool is not None
        held = [anchor.token_ids for anchor in state.pool.anchors]
        seen.add(seed)
        assert len(set(held)) == len(held) <= limit
        assert len(held) == limit or len(held) == len(seen)
        assert held[-1] == source.token_ids
        corrected(corrector, state, text(5, 99))


def test_a_repeated_text_replaces_its_own_entry() -> None:
    corrector = Anchors(None)
    state = taught(corrector, [text(5, 0), text(5, 1)])
    nbytes = state.nbytes
    corrector.learn(state, text(5, 0), shifted(text(5, 0), kv(5, 123)))
    assert (state.texts, state.nbytes) == (2, nbytes)
    torch.testing.assert_close(dense_of(state, "k", "offset")[1], pool_module.rows_of(kv(5, 123).k))


def test_eviction_spares_what_was_used() -> None:
    corrector = Anchors(None, pool=4, window=3, temperature=0.01)
    sources = [text(8, seed) for seed in range(4)]
    state = taught(corrector, sources)
    for used in (0, 2, 3):
        corrected(corrector, state, sources[used])
    assert state.pool is not None
    assert [round(anchor.credit) for anchor in state.pool.anchors] == [1, 0, 1, 1]
    fresh = text(8, 9)
    corrector.learn(state, fresh, fresh)
    assert [anchor.token_ids for anchor in state.pool.anchors] == [
        s.token_ids for s in (sources[0], sources[2], sources[3], fresh)]
    corrector.learn(state, text(8, 10), text(8, 10))
    assert len(state.pool) == 4
    assert fresh.token_ids in [a.token_ids for a in state.pool.anchors], "outside the window of the three oldest"


@pytest.mark.parametrize(("rank", "base_rank"), [(2, 3), (None, None), (32, 32)])
def test_bytes_are_the_formula(rank: int | None, base_rank: int | None) -> None:
    lengths, channels, layers, itemsize = (40, 6, 25), 24, 3, 2
    corrector = Anchors(rank, base_rank)
    state = taught(corrector, [text(n, n, Geometry(4, 3, 8, torch.bfloat16)) for n in lengths])

    def factors(cut: int | None, n: int) -> int:
        return n * channels if cut is None else min(cut, n, channels) * (n + channels)

    wanted = sum(2 * layers * itemsize * (factors(rank, n) + factors(base_rank, n)) for n in lengths)
    assert state.nbytes == wanted + 8 * sum(lengths), "factors, and two float32 a token for distances"
    assert state.pool is not None
    held = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in _tensors(state.pool)}
    assert sum(held.values()) == state.nbytes, "a tensor keeps a larger storage alive"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [t for item in value for t in _tensors(item)]
    return [t for item in getattr(value, "__dict__", {}).values() for t in _tensors(item)]


def test_200_cycles_hold_no_more_than_the_first_few() -> None:
    corrector = Anchors(2, 2, pool=4)
    memory = Memory(corrector, GEOMETRY)
    sizes = []
    for i in range(200):
        source = text(10, i)
        memory.learn(EDGE, source, shifted(source, offset(source, i)))
        state = memory.state(EDGE)
        assert isinstance(state, AnchorState)
        corrected(corrector, state, text(8, 500 + i))
        memory.check()
        sizes.append(memory.nbytes)
    assert set(sizes[3:]) == {sizes[3]}
    assert state.pool is not None
    assert len(state.pool.k._seen) == 0, "distances outlived the text they were of"
    assert state.texts == 200


def test_merge_takes_in_what_is_new() -> None:
    corrector = Anchors(2, pool=4)
    left, right = taught(corrector, [text(6, 0), text(7, 1)]), taught(corrector, [text(7, 1), text(9, 2)])
    right_bytes = right.nbytes
    left.merge(right)
    left.merge(corrector.new_state(GEOMETRY))
    assert left.pool is not None
    assert [a.token_ids for a in left.pool.anchors] == [text(6, 0).token_ids, text(7, 1).token_ids,
                                                        text(9, 2).token_ids]
    empty = corrector.new_state(GEOMETRY)
    empty.merge(right)
    assert (left.texts, empty.texts, right.nbytes) == (3, 2, right_bytes)
    corrected(corrector, empty, text(5, 9))
    assert right.pool is not None
    assert {a.credit for a in right.pool.anchors} == {0.0}, "credit is shared between two memories"
    left.check()


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "base_rank"), [(3, 4), (None, None), (3, None)])
def test_round_trip_is_bit_equal(tmp_path: Path, dtype: torch.dtype, rank: int | None, base_rank: int | None) -> None:
    geometry = Geometry(4, 3, 8, dtype)
    corrector, source = Anchors(rank, base_rank, pool=3), text(9, 60, geometry)
    memory = Memory(corrector, geometry)
    for i, n in enumerate((8, 20, 5, 11)):
        memory.learn(EDGE, text(n, i, geometry), shifted(text(n, i, geometry), kv(n, 90 + i, geometry)))
        corrected(corrector, memory.state(EDGE), source)  # type: ignore[arg-type]
    memory.save(tmp_path / "m", IDENTITY)
    check_file(tmp_path / "m")
    loaded = Memory.load(tmp_path / "m", corrector, geometry, IDENTITY)
    ours, theirs = memory.state(EDGE), loaded.state(EDGE)
    assert isinstance(ours, AnchorState)
    assert isinstance(theirs, AnchorState)
    assert ours.to_tensors().keys() == theirs.to_tensors().keys()
    for name, tensor in ours.to_tensors().items():
        assert torch.equal(tensor, theirs.to_tensors()[name]), name
    assert (ours.texts, ours.nbytes) == (theirs.texts, theirs.nbytes)
    for a, b in zip(corrected(corrector, ours, source), corrected(corrector, theirs, source), strict=True):
        torch.testing.assert_close(a, b)


BROKEN = {
    "no texts": lambda t: t.pop("texts"),
    "texts a matrix": lambda t: t.update(texts=torch.zeros(2, 2)),
    "fewer texts than anchors": lambda t: t.update(texts=torch.tensor([1])),
    "a factor missing": lambda t: t.pop("anchor1.offset_k.left"),
    "a factor flat": lambda t: t.update({"anchor1.base_v.left": torch.zeros(5)}),
    "a factor of other dtype": lambda t: t.update({"anchor0.base_v.left": t["anchor0.base_v.left"].double()}),
    "a factor too wide": lambda t: t.update({"anchor0.offset_v.right": torch.zeros(2, 2, 99)}),
    "factors of other ranks": lambda t: t.update({"anchor0.offset_v.left": torch.zeros(2, 6, 1)}),
    "a rank above the corrector's": lambda t: t.update({"anchor0.offset_v.left": torch.zeros(2, 6, 5),
                                                        "anchor0.offset_v.right": torch.zeros(2, 5, 8)}),
    "sides of other lengths": lambda t: t.update({"anchor0.offset_v.left": torch.zeros(2, 7, 2)}),
    "not finite": lambda t: t["anchor0.offset_v.left"].fill_(torch.nan),
    "ids not integers": lambda t: t.update({"anchor0.ids": torch.zeros(6)}),
    "ids a matrix": lambda t: t.update({"anchor0.ids": torch.zeros(6, 1, dtype=torch.int64)}),
    "ids too few": lambda t: t.update({"anchor0.ids": torch.zeros(3, dtype=torch.int64)}),
    "credit not a number": lambda t: t.update({"anchor0.credit": torch.tensor([torch.nan], dtype=torch.float64)}),
    "credit negative": lambda t: t.update({"anchor0.credit": torch.tensor([-1.0], dtype=torch.float64)}),
    "more anchors than the pool": lambda t: t.update({k.replace("anchor0", "anchor2"): v for k, v in t.items()}),
    "a tensor nobody wrote": lambda t: t.update({"anchor0.extra": torch.zeros(1)}),
    "a gap": lambda t: [t.update({k.replace("anchor1", "anchor5"): t.pop(k)}) for k in list(t) if "anchor1" in k],
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensors_are_refused(case: str) -> None:
    corrector = Anchors(2, 2, pool=2)
    tensors = {name: tensor.clone() for name, tensor in
               taught(corrector, [text(6, 0), text(7, 1)]).to_tensors().items()}
    corrector.new_state(GEOMETRY).from_tensors(tensors)
    BROKEN[case](tensors)
    with pytest.raises(StoreError):
        corrector.new_state(GEOMETRY).from_tensors(tensors)


@pytest.mark.parametrize("field", [{"rank": 0}, {"base_rank": 0}, {"pool": 0}, {"top_k": 0}, {"window": 0},
                                   {"temperature": 0.0}, {"temperature": float("nan")}])
def test_senseless_settings_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(field))):
        Anchors(**field)
