"""The affine correction against a plain float64 loop, and the rules of docs that it must hold to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbaton.correctors.affine import FAINT, Affine
from kvbaton.correctors.affine_state import AffineState
from kvbaton.correctors.base import joined, parts
from kvbaton.correctors.blocks import Blocks, Heads, Inputs
from kvbaton.correctors.fit import Ridge, cut
from kvbaton.errors import InvariantError, StoreError, UsageError
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Place

L, H, D = 3, 2, 4
GEOMETRY = Geometry(L, H, D, torch.float32)
Pair = tuple[KV, KV]


def kv_pair(seed: int, tokens: int = 30, start: int = 7, bias: float = 0.0, dtype: torch.dtype = torch.float32) -> Pair:
    """A source and a target whose offset depends on the source by one fixed map, plus noise; layer 0 is equal."""
    rng = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(99)
    k, v = (torch.randn(L, H, tokens, D, generator=rng) for _ in "kv")
    slope = 0.3 * torch.randn(L, H, 2 * D, 2 * D, generator=fixed)
    mean = 0.3 * torch.randn(L, H, 1, 2 * D, generator=fixed)
    bias_k = bias * torch.randn(L, H, 1, D, generator=fixed)
    dy = torch.cat((k, v), -1) @ slope + mean + 0.1 * torch.randn(L, H, tokens, 2 * D, generator=rng)
    dy[0] = 0
    dk, dv = dy.split(D, -1)
    k = k + bias_k
    ids = tuple(range(seed * 1000, seed * 1000 + tokens))
    source = KV(k.to(dtype), v.to(dtype), 50, "solver", True, token_ids=ids)
    return source, KV((k + dk).to(dtype), (v + dv).to(dtype), start, "critic", True, token_ids=ids)


def learned(rule: Affine, pairs: list[Pair], geometry: Geometry = GEOMETRY) -> AffineState:
    state = rule.new_state(geometry)
    for source, target in pairs:
        rule.learn(state, source, target)
        state.check()
    state.solve()
    return state


def corrected(rule: Affine, state: AffineState, source: KV, start: int) -> tuple[Tensor, Tensor]:
    layer = rule.correct(state, source, Place(start, len(source)))
    k, v = zip(*(joined(parts(layer, source, at)) for at in range(len(source.k))), strict=True)
    return torch.stack(k), torch.stack(v)


def learned_rows(rule: Affine, tokens: int) -> list[int]:
    """At most ``max_rows`` of the rows behind the skipped ones, first and last among them, evenly spread."""
    count = min(tokens - rule.skip_rows, rule.max_rows)
    step = (tokens - 1 - rule.skip_rows) / max(count - 1, 1)
    return [round(rule.skip_rows + i * step) for i in range(count)]


def reference(rule: Affine, pairs: list[Pair], source: KV, start: int) -> tuple[Tensor, Tensor]:
    """The algorithm one layer, group of heads and token at a time, in float64."""
    out_k, out_v = source.k.double().clone(), source.v.double().clone()
    groups = [[h] for h in range(H)] if rule.heads is Heads.PER_HEAD else [list(range(H))]

    def features(kv: KV, layer: int, heads: list[int], t: int) -> Tensor:
        return torch.cat((kv.k[layer, heads, t].flatten(), kv.v[layer, heads, t].flatten())).double()

    for layer in range(1, L):
        for heads in groups:
            n, m, f = 0.0, 0.0, 2 * D * len(heads)
            sx, sy = torch.zeros(f).double(), torch.zeros(f).double()
            gram, cross = torch.zeros(f, f).double(), torch.zeros(f, f).double()
            for a, b in pairs:
                n, m = n * rule.forget, m * rule.forget + 1
                for part in (sx, sy, gram, cross):
                    part *= rule.forget
                rows = learned_rows(rule, len(a))
                for t in rows:
                    g = (b.start / (b.start + t)) ** rule.decay
                    x = features(a, layer, heads, t)
                    y = (features(b, layer, heads, t) - x) / g
                    w = g * g * min(len(a) - rule.skip_rows, rule.text_tokens) / len(rows)
                    n, sx, sy = n + w, sx + w * x, sy + w * y
                    gram, cross = gram + w * torch.outer(x, x), cross + w * torch.outer(x, y)
            mu, my = sx / n, sy / n
            spread, c = gram / n - torch.outer(mu, mu), cross / n - torch.outer(mu, my)
            s = (spread.diagonal() + 1e-6 * spread.diagonal().mean() + 1e-12).sqrt()
            slopes = torch.linalg.solve(spread / torch.outer(s, s) + rule.ridge_tokens / n * torch.eye(f).double(),
                                        c / s[:, None])
            w_full = slopes / s[:, None]
            if rule.rank is not None and rule.rank < f:
                basis = torch.linalg.eigh(c.mT @ w_full).eigenvectors[:, f - rule.rank:]
                w_full = w_full @ basis @ basis.mT
            usual = (w_full.mT @ spread @ w_full).trace().sqrt()
            shift = m / (m + rule.offset_prior) * my
            strength = min(1, rule.text_tokens / len(source)) ** 0.5
            for t in range(len(source)):
                x = features(source, layer, heads, t)
                g = strength * (start / (start + t)) ** rule.decay
                if g < FAINT:
                    continue
                slope = (x - mu) @ w_full
                slope *= (rule.slope_limit * usual / slope.norm().clamp(min=1e-300)).clamp(max=1)
                to_k, to_v = (g * (slope + shift)).view(2, len(heads), D)
                out_k[layer, heads, t] += to_k
                out_v[layer, heads, t] += to_v
    return out_k, out_v


@pytest.mark.parametrize("rule", [Affine(), Affine(rank=3, ridge_tokens=20), Affine(rank=0), Affine(rank=None),
                                  Affine(heads=Heads.PER_HEAD), Affine(heads=Heads.PER_HEAD, rank=3, skip_rows=2),
                                  Affine(rank=2, forget=0.8, skip_rows=4, decay=1.0, offset_prior=2.0),
                                  Affine(ridge_tokens=50, max_rows=7), Affine(max_rows=8, skip_rows=4),
                                  Affine(text_tokens=11, skip_rows=2), Affine(text_tokens=12, max_rows=9),
                                  Affine(decay=3.0), Affine(text_tokens=1, decay=1.0), Affine(slope_limit=0.9),
                                  Affine(slope_limit=0.9, rank=3, ridge_tokens=20, heads=Heads.PER_HEAD),
                                  Affine(slope_limit=0.1, rank=None, ridge_tokens=5)])
def test_equals_plain_loop(rule: Affine) -> None:
    pairs = [kv_pair(seed, tokens=20 + seed, start=5 + seed) for seed in range(4)]
    source, _ = kv_pair(50)
    state = learned(rule, pairs)
    for got, want in zip(corrected(rule, state, source, 11), reference(rule, pairs, source, 11), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)


def test_rows_that_would_get_next_to_nothing_are_left_alone() -> None:
    source, target = kv_pair(1, tokens=120, start=12)
    some, none = Affine(text_tokens=2), Affine(text_tokens=1)
    k, v = corrected(some, learned(some, [(source, target)]), source, 12)
    first = int(some.shares(12, torch.arange(120), 120).count_nonzero())
    assert 0 < first < 120
    assert torch.equal(k[:, :, first:], source.k[:, :, first:])
    assert not bool((v[1:, :, :first] == source.v[1:, :, :first]).all(-1).any())
    k, v = corrected(none, learned(none, [(source, target)]), source, 12)
    assert torch.equal(k, source.k)
    assert torch.equal(v, source.v)


@pytest.mark.parametrize("rule", [Affine(), Affine(heads=Heads.PER_HEAD), Affine(inputs=Inputs.SPLIT), Affine(rank=0)])
def test_keys_of_texts_that_are_corrected_together_are_corrected_by_less(rule: Affine) -> None:
    pairs, (source, _) = [kv_pair(seed) for seed in range(3)], kv_pair(50)
    rule = replace(rule, text_tokens=len(source))
    state = learned(rule, pairs)
    alone, beside = ([rule.correct(state, source, Place(11, tokens))(layer) for layer in range(L)]
                     for tokens in (len(source), 4 * len(source)))
    for layer, ((k, v), (less_k, same_v)) in enumerate(zip(alone, beside, strict=True)):
        torch.testing.assert_close(less_k - source.k[layer], (k - source.k[layer]) / 2, atol=1e-5, rtol=1e-4)
        assert torch.equal(same_v, v)
        assert layer == 0 or not torch.equal(less_k, k)


def test_equal_prefixes_leave_everything_as_it_is() -> None:
    rule, pairs = Affine(), [(s, replace(s, start=7, source="critic")) for s, _ in map(kv_pair, range(3))]
    source, _ = kv_pair(50)
    k, v = corrected(rule, learned(rule, pairs), source, 7)
    assert torch.equal(k, source.k)
    assert torch.equal(v, source.v)


def test_true_affine_data_is_recovered() -> None:
    rule = Affine(rank=None, ridge_tokens=1e-4, decay=0.0, offset_prior=0.0, text_tokens=200, slope_limit=1e3)

    def exact(seed: int) -> Pair:
        source, _ = kv_pair(seed, tokens=200)
        rng = torch.Generator().manual_seed(5)
        slope, mean = torch.randn(L, H, 2 * D, 2 * D, generator=rng), torch.randn(L, H, 1, 2 * D, generator=rng)
        dy = torch.cat((source.k, source.v), -1) @ slope + mean
        dy[0] = 0
        return source, replace(source, k=source.k + dy[..., :D], v=source.v + dy[..., D:])

    state = learned(rule, [exact(seed) for seed in range(5)])
    source, target = exact(60)
    k, v = corrected(rule, state, source, 9)
    torch.testing.assert_close(k, target.k, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(v, target.v, atol=1e-4, rtol=1e-4)
    narrow = Affine(rank=2, ridge_tokens=1e-4, decay=0.0, offset_prior=0.0)
    k, _ = corrected(narrow, learned(narrow, [exact(seed) for seed in range(5)]), source, 9)
    assert (k - target.k).abs().max() > 1e-2


def test_a_row_unlike_those_learned_gets_no_more_than_the_limit() -> None:
    rule = Affine(ridge_tokens=5.0, decay=0.0, text_tokens=10_000, slope_limit=1.5)
    pairs = [kv_pair(seed, tokens=60) for seed in range(3)]

    def slopes(limit: float, source: KV) -> Tensor:
        """Of each row of a block of all heads: ``[L - 1, T]``."""
        limited = replace(rule, slope_limit=limit)
        state = learned(limited, pairs)
        assert state.map is not None
        k, v = corrected(limited, state, source, 7)
        moved = torch.cat((k - source.k, v - source.v), -1).movedim(1, 2).flatten(-2)[1:]
        shift = state.map.shift.view(L - 1, 2, H, D).movedim(1, 2).reshape(L - 1, 1, -1)
        return (moved - shift).norm(dim=-1)

    usual = torch.cat([slopes(1e3, source) for source, _ in pairs], -1).square().mean(-1, keepdim=True).sqrt()
    strange = replace(pairs[0][0], k=50 * pairs[0][0].k)
    assert bool((slopes(1e3, strange) > 10 * usual).any())
    torch.testing.assert_close(slopes(1.5, strange).amax(-1, keepdim=True), 1.5 * usual, rtol=1e-3, atol=1e-3)
    near = slopes(1e3, pairs[1][0])
    kept = near < 1.49 * usual
    assert bool(kept.any())
    torch.testing.assert_close(slopes(1.5, pairs[1][0])[kept], near[kept], rtol=1e-3, atol=1e-4)


def test_an_endless_ridge_leaves_only_the_mean_offset() -> None:
    pairs, (source, _) = [kv_pair(seed) for seed in range(3)], kv_pair(50)
    stiff = Affine(ridge_tokens=1e15)
    shift = Affine(rank=0)
    for got, want in zip(corrected(stiff, learned(stiff, pairs), source, 7),
                         corrected(shift, learned(shift, pairs), source, 7), strict=True):
        torch.testing.assert_close(got, want)
    none = Affine(ridge_tokens=1e15, offset_prior=1e15)
    k, v = corrected(none, learned(none, pairs), source, 7)
    torch.testing.assert_close(k, source.k)
    torch.testing.assert_close(v, source.v)


@given(st.permutations(range(4)))
@settings(max_examples=10, deadline=None)
def test_order_of_learning_does_not_matter(order: list[int]) -> None:
    rule, pairs, (source, _) = Affine(), [kv_pair(seed, tokens=10 + 5 * seed) for seed in range(4)], kv_pair(50)
    one, other = learned(rule, pairs), learned(rule, [pairs[i] for i in order])
    torch.testing.assert_close(corrected(rule, other, source, 7), corrected(rule, one, source, 7), atol=1e-5, rtol=1e-5)


@given(st.integers(1, 4), st.booleans())
@settings(max_examples=8, deadline=None)
def test_sums_of_two_workers_add_up(cut: int, empty_first: bool) -> None:
    rule, pairs, (source, _) = Affine(), [kv_pair(seed, bias=100.0) for seed in range(5)], kv_pair(50, bias=100.0)
    mine = learned(rule, [] if empty_first else pairs[:cut])
    mine.merge(learned(rule, pairs[0 if empty_first else cut - 1:]))  # one text was seen by both
    mine.check()
    weights = [1 + (i == cut - 1 and not empty_first) for i in range(5)]
    alone = learned(rule, [pair for pair, times in zip(pairs, weights, strict=True) for _ in range(times)])
    assert mine.texts == alone.texts == 5
    torch.testing.assert_close(corrected(rule, mine, source, 7), corrected(rule, alone, source, 7), atol=2e-4, rtol=0)


@pytest.mark.parametrize("bias", [0.0, 300.0, 3000.0])
def test_large_key_bias_is_safe_in_float32(bias: float) -> None:
    rule, pairs, (source, _) = Affine(), [kv_pair(seed, bias=bias) for seed in range(4)], kv_pair(50, bias=bias)
    state = learned(rule, pairs)
    k, v = corrected(rule, state, source, 7)
    want_k, want_v = reference(rule, pairs, source, 7)
    # float32 itself rounds a key of this size by bias * 6e-8; the map must not add to that
    assert (k.double() - want_k).abs().max() < 1e-5 + 1e-6 * bias
    assert (v.double() - want_v).abs().max() < 1e-5 + 1e-6 * bias


def test_bfloat16_with_a_key_bias_stays_near_the_reference() -> None:
    rule = Affine()
    pairs = [kv_pair(seed, bias=30.0, dtype=torch.bfloat16) for seed in range(4)]
    source, _ = kv_pair(50, bias=30.0, dtype=torch.bfloat16)
    state = learned(rule, pairs, replace(GEOMETRY, dtype=torch.bfloat16))
    _, v = corrected(rule, state, source, 7)
    _, want = reference(rule, pairs, source, 7)
    assert v.dtype == torch.bfloat16
    assert (v.double() - want).abs().max() < 0.02


def test_forgetting_follows_a_changed_edge() -> None:
    old = [kv_pair(seed) for seed in range(10)]
    new = []
    for source, target in map(kv_pair, range(20, 26)):
        new.append((source, replace(target, v=source.v - (target.v - source.v))))
    source, target = kv_pair(60)
    want = source.v - (target.v - source.v)
    errors = []
    for forget in (1.0, 0.7):
        rule = Affine(ridge_tokens=20.0, forget=forget)
        _, v = corrected(rule, learned(rule, old + new), source, 7)
        errors.append((v - want).square().mean())
    assert errors[1] < 0.5 * errors[0]


def test_saved_and_loaded_gives_an_equal_state() -> None:
    rule, (source, _) = Affine(rank=3), kv_pair(50)
    state = learned(rule, [kv_pair(seed) for seed in range(4)])
    state.record.audited_once(0.5)
    loaded = rule.new_state(GEOMETRY)
    loaded.from_tensors(dict(state.to_tensors()))
    loaded.check()
    for one, other in zip(corrected(rule, state, source, 7), corrected(rule, loaded, source, 7), strict=True):
        assert torch.equal(one, other)
    assert (loaded.texts, loaded.nbytes, loaded.record) == (state.texts, state.nbytes, state.record)
    fresh = rule.new_state(GEOMETRY)
    fresh.from_tensors(dict(rule.new_state(GEOMETRY).to_tensors()))
    assert fresh.texts == 0
    assert not rule.can_correct(fresh, source)


@pytest.mark.parametrize("name", ["sums.gram", "sums.centre", "map.lift", "map.down", "lens.whiten", "texts.count",
                                  "record"])
@pytest.mark.parametrize("harm", ["missing", "shape", "nan"])
def test_a_broken_store_is_refused(name: str, harm: str) -> None:
    rule = Affine(rank=3)
    tensors = dict(learned(rule, [kv_pair(0)]).to_tensors())
    good = tensors.pop(name)
    if harm == "shape":
        tensors[name] = good[..., :-1]
    elif harm == "nan":
        tensors[name] = torch.full_like(good, float("nan"))
    with pytest.raises(StoreError):
        rule.new_state(GEOMETRY).from_tensors(tensors)


@pytest.mark.parametrize("inputs", Inputs)
@pytest.mark.parametrize(("kv_heads", "head_dim", "heads", "together"), [
    (2, 4, Heads.PER_HEAD, 1), (2, 4, Heads.GROUPED, 2), (2, 4, Heads.JOINT, 2), (6, 128, Heads.GROUPED, 2),
    (5, 128, Heads.GROUPED, 1), (2, 512, Heads.GROUPED, 1), (6, 128, Heads.JOINT, 6)])
def test_blocks_pack_and_unpack(inputs: Inputs, kv_heads: int, head_dim: int, heads: Heads, together: int) -> None:
    blocks = Blocks(Geometry(L, kv_heads, head_dim, torch.float32), inputs, heads)
    if inputs is Inputs.JOINT_KV:
        assert blocks.together == together
    k, v = torch.randn(2, L, kv_heads, 5, head_dim)
    x = blocks.pack(k, v)
    assert x.shape == (L, blocks.count, 5, blocks.features)
    for one, other in zip(blocks.unpack(x), (k, v), strict=True):
        assert torch.equal(one, other)
    alone = replace(blocks, heads=Heads.PER_HEAD)
    for head, features in enumerate(alone.pack(k, v).unbind(1)):
        block, at = blocks.single(head)
        assert torch.equal(x[:, block, :, at], features)


def test_grouped_heads_learn_as_if_each_group_were_a_model_of_its_own() -> None:
    wide, rng = Geometry(2, 4, 128, torch.float32), torch.Generator().manual_seed(1)
    parts = [torch.randn(2, 4, 20, 128, generator=rng) for _ in range(4)]
    source, target = KV(parts[0], parts[1], 9, "solver", True), KV(parts[2], parts[3], 5, "critic", True)
    rule = Affine(rank=3)
    k, v = corrected(rule, learned(rule, [(source, target)], wide), source, 5)
    for group in (slice(0, 2), slice(2, 4)):
        part_source, part_target = (replace(kv, k=kv.k[:, group], v=kv.v[:, group]) for kv in (source, target))
        half = learned(rule, [(part_source, part_target)], Geometry(2, 2, 128, torch.float32))
        part_k, part_v = corrected(rule, half, part_source, 5)
        torch.testing.assert_close(k[:, group], part_k)
        torch.testing.assert_close(v[:, group], part_v)


def test_a_map_is_cut_to_its_numbers_but_not_below_rank_8() -> None:
    geometry = Geometry(32, 8, 128, torch.bfloat16)
    blocks = Blocks(geometry)
    per_rank = 2 * blocks.layers * blocks.count * blocks.features
    for rule, rank in ((Affine(), 8), (Affine(map_numbers=per_rank * 21), 20), (Affine(map_numbers=1), 8),
                       (Affine(rank=4, map_numbers=1), 4), (Affine(rank=None, map_numbers=1), None),
                       (Affine(rank=600), 8), (Affine(rank=600, map_numbers=per_rank * 600), None)):
        assert rule.new_state(geometry).rule.rank == rank
    assert Affine().new_state(Geometry(30, 3, 64, torch.bfloat16)).rule.rank == 32


@pytest.mark.parametrize("rule", [Affine(inputs=Inputs.SPLIT), Affine(heads=Heads.PER_HEAD),
                                  Affine(inputs=Inputs.SPLIT, heads=Heads.PER_HEAD)])
def test_variants_learn_and_know_what_they_see(rule: Affine) -> None:
    rule = replace(rule, rank=None, ridge_tokens=1.0)
    source, target = kv_pair(50)
    state = learned(rule, [kv_pair(seed, tokens=100) for seed in range(6)])
    k, v = corrected(rule, state, source, 7)
    assert (v[1:] - target.v[1:]).square().sum() < (source.v[1:] - target.v[1:]).square().sum()
    assert torch.equal(k[0], source.k[0])
    moved, _ = corrected(rule, state, replace(source, v=source.v + 1), 7)
    assert torch.allclose(moved, k) == (rule.inputs is Inputs.SPLIT)
    tilted = source.k.clone()
    tilted[:, 1] += 1
    moved, _ = corrected(rule, state, replace(source, k=tilted), 7)
    assert torch.allclose(moved[:, 0], k[:, 0]) == (rule.heads is Heads.PER_HEAD)


@pytest.mark.parametrize(("spread", "kept"), [(0.9, 0.995), (1.0, 0.85)])
def test_a_cut_explains_what_all_eigenvectors_would(spread: float, kept: float) -> None:
    rng = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(2, 128, 128, generator=rng, dtype=torch.float64)).Q
    values = spread ** torch.arange(128).double() if spread < 1 else torch.rand(128, generator=rng).double()
    cross, eye = (turn * values.sqrt()).mT, torch.eye(128, dtype=torch.float64).expand(2, 128, 128)
    inputs = Ridge(eye, torch.full((2, 128), 0.1).double())
    # Gram and ridge together are the unit matrix: the slopes are the cross-products.
    slopes, basis, explains = cut(cross, inputs, 8)
    torch.testing.assert_close(slopes, cross @ basis, atol=1e-5, rtol=0)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(8, dtype=torch.float64).expand(2, 8, 8), atol=1e-5, rtol=0)
    explained = (cross @ basis).square().sum((-2, -1))
    assert bool((explained >= kept * values.topk(8).values.sum()).all())
    torch.testing.assert_close(explains, explained, atol=1e-5, rtol=1e-5)
    assert torch.equal(cut(cross, inputs, 8).basis, basis)  # the same sums give the same map, anywhere
    assert all(bool(part.isfinite().all()) for part in cut(torch.zeros_like(cross), inputs, 8))


@pytest.mark.parametrize("ridge", [0.05, 2.0])
def test_wide_features_are_cut_as_narrow_ones_are(ridge: float) -> None:
    """Subspace iteration over ill-conditioned inputs explains what the eigenvectors of the fit would."""
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(2, 300, 256, generator=rng, dtype=torch.float64) @ torch.randn(256, 256, generator=rng).double()
    x = (x - x.mean(-2, keepdim=True)) / x.std(-2, keepdim=True)
    y = x @ torch.randn(256, 12, generator=rng).double() @ torch.randn(12, 256, generator=rng).double()
    y += torch.randn(y.shape, generator=rng)
    correlation, cross = x.mT @ x / 300, x.mT @ y / 300
    factor = torch.linalg.cholesky(correlation + ridge * torch.eye(256).double())
    slopes = torch.cholesky_solve(cross, factor)
    moment = cross.mT @ slopes
    best = torch.linalg.eigvalsh(moment)[..., -16:].sum(-1)
    basis = cut(cross, Ridge(factor, torch.full((2, 256), ridge).double()), 16).basis
    explained = (basis.mT @ moment @ basis).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert bool((explained > 0.995 * best).all())


def test_texts_are_counted_once_and_shrink_the_offset() -> None:
    pair, rule = kv_pair(0), Affine(rank=0, decay=0.0, offset_prior=1.0)
    state = learned(rule, [pair] * 3)
    assert (state.texts, state.record.learned) == (1, 3)
    assert state.map is not None
    mean = (pair[1].v - pair[0].v)[1:].mean(-2)
    torch.testing.assert_close(state.map.shift.view(L - 1, 2, H, D)[:, 1], mean / 2)


def test_out_of_sample_error_is_measured_before_learning() -> None:
    rule = Affine(ridge_tokens=1.0, rank=None)
    state = learned(rule, [kv_pair(0, tokens=200)])
    assert state.record.ratio is None  # nothing was known when the first text came
    for seed in range(1, 12):
        rule.learn(state, *kv_pair(seed, tokens=200))
    assert state.record.ratio is not None
    assert state.record.ratio < 0.5


def test_novelty_is_one_for_the_like_and_large_for_the_unlike() -> None:
    rule = Affine(ridge_tokens=1.0)
    state = learned(rule, [kv_pair(seed, tokens=300) for seed in range(5)])
    like, _ = kv_pair(70, tokens=300)
    assert state.novelty(like) == pytest.approx(1.0, abs=0.1)
    foreign = state.novelty(replace(like, v=2 * like.v + 1))
    assert foreign is not None
    assert foreign > 2
    assert rule.new_state(GEOMETRY).novelty(like) is None
    assert state.novelty(like.rows(0, 1)) is not None


def test_a_segment_of_lead_rows_alone_teaches_nothing() -> None:
    rule = Affine(skip_rows=4)
    state = rule.new_state(GEOMETRY)
    rule.learn(state, *kv_pair(0, tokens=4))
    assert (state.texts, state.nbytes) == (0, 0)
    state.check()


def test_a_segment_without_a_prefix_is_learned_and_corrected() -> None:
    rule = Affine()
    state = learned(rule, [kv_pair(0, start=0)])
    k, _ = corrected(rule, state, kv_pair(1)[0], 0)
    assert bool(k.isfinite().all())


def test_bytes_are_the_formula() -> None:
    llama = Affine().new_state(Geometry(32, 8, 128, torch.bfloat16))
    assert (llama.blocks.layers * llama.blocks.count, llama.blocks.features) == (31 * 4, 512)
    state = learned(Affine(rank=2), [kv_pair(0)])
    features, layers = 2 * D * H, L - 1
    lens = 4 * H * (2 * D + (2 * D)**2)
    assert state.hot_nbytes == 4 * layers * features * (2 * 2 + 2) + lens
    assert state.sums is not None
    assert state.sums.nbytes == 4 * layers * (1 + 3 * features + 2 * features**2)
    assert state.nbytes == state.hot_nbytes + state.sums.nbytes + 8


def test_misuse_is_refused() -> None:
    for wrong in ({"rank": -1}, {"ridge_tokens": 0.0}, {"forget": 0.0}, {"forget": 1.5}, {"skip_rows": -1},
                  {"max_rows": 0}, {"text_tokens": 0}, {"map_numbers": 0}, {"slope_limit": 0.0},
                  {"slope_limit": float("inf")}, {"slope_limit": float("nan")}):
        with pytest.raises(UsageError):
            Affine(**wrong)  # type: ignore[arg-type]
    rule = Affine()
    with pytest.raises(InvariantError):
        rule.correct(rule.new_state(GEOMETRY), kv_pair(0)[0], Place(3, 9))
    with pytest.raises(InvariantError):
        learned(rule, [kv_pair(0)]).merge(learned(Affine(rank=3), [kv_pair(0)]))
