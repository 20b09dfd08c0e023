"""The Entropy gate: the rule, its faults of old, and that it judges the edge's own pool."""

from __future__ import annotations

import math

import pytest
import torch

from kvbaton.correctors.anchors import Anchors
from kvbaton.correctors.anchors_state import AnchorState
from kvbaton.errors import UsageError
from kvbaton.gates import Entropy
from kvbaton.kv import KV
from test_anchors import GEOMETRY, dense_of, offset, taught, text
from toys import kv, shifted


def entropy_of(state: AnchorState, source: KV, reference_tokens: int | None) -> tuple[float, int]:
    """Entropy in bits and number of anchors kept, by the definition, everything reconstructed."""
    n, distances = len(source), []
    for base in dense_of(state, "v", "base"):
        if base.shape[1] >= n:
            distances.append((source.v[1:].transpose(1, 2).flatten(2) - base[:, :n]).norm())
    scale = 1.0 if reference_tokens is None else math.sqrt(reference_tokens / n)
    shares = torch.softmax(-torch.stack(distances).double() * scale, 0)
    return -float((shares * shares.log2()).sum()), len(distances)


@pytest.mark.parametrize("reference_tokens", [None, 2, 64])
@pytest.mark.parametrize("rank", [None, 3])
def test_accepts_up_to_tau_of_the_largest_entropy(rank: int | None, reference_tokens: int | None) -> None:
    state = taught(Anchors(rank, rank), [text(n, n) for n in (9, 12, 15, 6)])
    source = text(8, 77)
    entropy, kept = entropy_of(state, source, reference_tokens)
    assert kept == 3
    share = entropy / math.log2(kept)
    for tau, accepted in ((share + 0.01, True), (share - 0.01, False)):
        verdict = Entropy(min(max(tau, 0.0), 1.0), reference_tokens).judge(state, source, 5)
        assert verdict.accept == accepted
        assert verdict.teach == (not accepted)
        assert f"entropy {entropy:.2f}" in verdict.reason


@pytest.mark.parametrize("lengths", [(), (9,), (9, 7), (7, 7)])
def test_fewer_than_two_anchors_as_long_ask_for_a_lesson(lengths: tuple[int, ...]) -> None:
    corrector = Anchors()
    state = corrector.new_state(GEOMETRY)
    for i, n in enumerate(lengths):
        corrector.learn(state, text(n, i), shifted(text(n, i), kv(n, 50 + i)))
    verdict = Entropy(1.0).judge(state, text(8, 77), 0)
    assert not verdict.accept
    assert verdict.teach
    assert not Entropy().judge(None, text(8, 77), 0).accept


def test_a_known_text_is_accepted_and_one_between_two_is_not() -> None:
    state = taught(Anchors(None, None), [text(12, seed) for seed in range(3)])
    assert Entropy(0.3).judge(state, text(12, 1), 0).accept
    a, b = text(12, 0), text(12, 1)
    middle = KV((a.k + b.k) / 2, (a.v + b.v) / 2, 0, "a", True)
    assert not Entropy(0.3).judge(state, middle, 0).accept


def test_scaled_distances_serve_short_and_long_texts_alike() -> None:
    """Two anchors, one a tenth farther in every value: unscaled, the verdict follows the length."""
    def judged(tokens: int, reference_tokens: int | None) -> float:
        source = kv(tokens, 5)
        ones = torch.ones_like(source.v)
        near, far = (KV(source.k, source.v + step * ones, 0, "a", True, token_ids=(i,) * tokens)
                     for i, step in enumerate((0.10, 0.11)))
        state = taught(Anchors(None, None), [near, far])
        return float(Entropy(0.5, reference_tokens).judge(state, source, 0).reason.split()[1])

    assert judged(400, 64) == pytest.approx(judged(40, 64), abs=0.02)
    assert judged(4000, None) < judged(40, None) - 0.05


@pytest.mark.parametrize("wrong", [{"tau": -0.1}, {"tau": 1.1}, {"reference_tokens": 0}])
def test_senseless_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Entropy(**wrong)  # type: ignore[arg-type]


def test_the_pool_judged_is_the_edges_own() -> None:
    corrector = Anchors(None, None)
    mine, other = taught(corrector, [text(12, 0), text(12, 1)]), corrector.new_state(GEOMETRY)
    corrector.learn(other, text(12, 0), shifted(text(12, 0), offset(text(12, 0), 1)))
    assert Entropy(0.3).judge(mine, text(12, 0), 0).accept
    assert not Entropy(0.3).judge(other, text(12, 0), 0).accept
