"""The residual gate: when an edge's record lets a text through, and how a record is saved and merged."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from kvbaton.correctors.none import NoState
from kvbaton.correctors.record import Record
from kvbaton.errors import StoreError, UsageError
from kvbaton.gates import Residual
from kvbaton.kv import KV

TEXT = KV(torch.zeros(2, 1, 3, 2), torch.zeros(2, 1, 3, 2), 0, "solver", True)


@dataclass
class State(NoState):
    """A state that is nothing but its record and the novelty of the text at hand."""

    record: Record = field(default_factory=Record)
    now: float | None = None

    def novelty(self, source: KV) -> float | None:
        return self.now


def state(errors: list[float], divergences: list[float] = [], now: float | None = None) -> State:  # noqa: B006
    """Dense hops with these errors (offset 1 each, the first without a map), audited as far as divergences go."""
    record = Record()
    for i, error in enumerate(errors):
        record.learned_from(1.0, error if i else None, 1.0 if i else None)
        if i < len(divergences):
            record.audited_once(divergences[i])
    return State(record=record, now=now)


def test_cold_start_reuses_from_the_second_hop() -> None:
    assert Residual().judge(state([1.0]), TEXT, 5).accept


def test_a_useless_correction_goes_dense_and_learns() -> None:
    verdict = Residual().judge(state([1.0, 1.1]), TEXT, 5)
    assert (verdict.accept, verdict.teach, verdict.reason) == (False, True, "correction does no good")
    assert Residual().judge(state([1.0, 1.1, 0.4]), TEXT, 5).accept
    nothing = State()
    for error in (None, 2e-9, 3e-9):
        nothing.record.learned_from(1e-9, error, 1.0)
    assert Residual().judge(nothing, TEXT, 5).accept, "equal prefixes leave rounding noise that nothing can correct"


def test_a_target_needs_a_measured_divergence_below_it() -> None:
    gate = Residual(target=0.01)
    assert gate.judge(state([1.0, 0.5]), TEXT, 5).reason == "divergence not measured yet"
    refused = gate.judge(state([1.0, 0.5, 0.5], [0.03, 0.015, 0.015]), TEXT, 5)
    assert (refused.accept, refused.teach, refused.reason) == (False, True, "predicted divergence above target")
    taken = gate.judge(state([1.0, 0.1, 0.1], [0.03, 0.003, 0.003]), TEXT, 5)
    assert taken.accept
    assert taken.predicted is not None
    assert taken.predicted <= 0.01


def test_prediction_follows_the_error_and_trusts_few_audits_less() -> None:
    record = state([1.0, 0.5, 0.5, 0.5], [0.02, 0.01]).record
    assert record.predicted == pytest.approx(0.02 * 0.5 * (1 + 2**-0.5))
    once = state([1.0], [0.02]).record
    assert once.predicted == pytest.approx(0.02 * 2)
    assert Record().predicted is None


def test_a_foreign_text_goes_dense_until_its_kind_is_known() -> None:
    assert Residual().judge(state([1.0, 0.5], now=1.1), TEXT, 5).accept
    verdict = Residual().judge(state([1.0, 0.5], now=1.5), TEXT, 5)
    assert (verdict.accept, verdict.teach, verdict.reason) == (False, True, "foreign text")
    assert Residual(foreign=2.0).judge(state([1.0, 0.5], now=1.5), TEXT, 5).accept
    assert not Residual().judge(state([1.0], now=1.6), TEXT, 5).accept, "foreign to the one text that is known"
    assert Residual().judge(state([1.0], now=1.4), TEXT, 5).accept


def test_a_slot_whose_texts_vary_calls_fewer_of_them_foreign() -> None:
    steady, varied = state([1.0, 0.5], now=1.6), state([1.0, 0.5], now=1.6)
    for novelty in (0.7, 1.6, 0.8, 1.5, 0.7, 1.6):
        steady.record.learned_from(1.0, 0.5, 1.15)
        varied.record.learned_from(1.0, 0.5, novelty)
    assert steady.record.usual.mean == pytest.approx(varied.record.usual.mean, abs=0.06)
    assert not Residual().judge(steady, TEXT, 5).accept
    assert Residual().judge(varied, TEXT, 5).accept
    assert not Residual(spreads=0.5).judge(varied, TEXT, 5).accept


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1.0])
def test_dense_share_is_met(share: float) -> None:
    edge, gate = state([1.0]), Residual(dense_share=share)
    for _ in range(200):
        if gate.judge(edge, TEXT, 5).accept:
            edge.record.reused_once(1.0)
        else:
            edge.record.learned_from(1.0, 0.5, 1.0)
    dense = edge.record.learned / (edge.record.learned + edge.record.reused)
    assert dense == pytest.approx(share, abs=0.006)


def test_record_survives_a_round_trip_and_merges() -> None:
    record = state([1.0, 0.5, 0.4], [0.02, 0.01]).record
    record.reused_once(1.1)
    assert Record.from_tensors(record.to_tensors()) == record
    both = Record.from_tensors(record.to_tensors())
    both.merge(record)
    assert (both.learned, both.reused, both.audits) == (6, 2, 4)
    assert both.ratio == pytest.approx(record.ratio)
    for broken in ({}, {"record": torch.zeros(3)}, {"record": torch.full((14,), float("inf")).double()}):
        with pytest.raises(StoreError):
            Record.from_tensors(broken)


def test_misuse_is_refused() -> None:
    for wrong in ({"target": -1.0}, {"dense_share": 1.5}, {"foreign": 0.0}):
        with pytest.raises(UsageError):
            Residual(**wrong)
    with pytest.raises(UsageError, match="Affine"):
        Residual().judge(NoState(), TEXT, 5)
