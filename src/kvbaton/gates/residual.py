"""Residual: reuse where the correction has proved itself. Ours."""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.correctors.base import EdgeState
from kvbaton.correctors.record import Recorded
from kvbaton.errors import UsageError
from kvbaton.gates.base import Verdict
from kvbaton.kv import KV


@dataclass(frozen=True)
class Residual:
    """Ours: reuse where the correction has proved itself on this edge's dense hops; elsewhere go dense, and learn.

    Every refusal asks for a dense hop, because a dense hop is what it takes to mend the reason: it is measured before
    it is learned from. In this order:

    - the correction leaves as much error as it takes away, out of sample (where there is any error worth the name);
    - ``target``: the predicted divergence of reuse is above it, nats a token, or none was measured yet;
    - the text is foreign: more than ``foreign`` times as unlike the texts learned as this edge's texts usually are, and
      more than ``spreads`` standard deviations above them;
    - ``dense_share``: fewer of the edge's hops than that were dense so far.

    Needs a corrector whose state keeps a record, such as `Affine`. Rule and measurements:
    docs/decisions/0002-residual-gate.md.
    """

    target: float | None = None
    dense_share: float | None = None
    foreign: float = 1.2
    spreads: float = 2.0

    def __post_init__(self) -> None:
        if self.target is not None and self.target < 0:
            raise UsageError(f"target is a divergence in nats a token, 0 or more, got {self.target}")
        if self.dense_share is not None and not 0 <= self.dense_share <= 1:
            raise UsageError(f"dense_share is a ratio from 0 to 1, got {self.dense_share}")
        if self.foreign <= 0:
            raise UsageError(f"foreign is a ratio above 0, got {self.foreign}")
        if self.spreads < 0:
            raise UsageError(f"spreads is a count of standard deviations, 0 or more, got {self.spreads}")

    def judge(self, state: EdgeState | None, source: KV, start: int) -> Verdict:
        if not isinstance(state, Recorded):
            raise UsageError("the residual gate needs a corrector that keeps a record of its errors, such as Affine")
        record = state.record
        predicted = record.predicted
        reason = None
        if record.useless:
            reason = "correction does no good"
        elif self.target is not None and predicted is None:
            reason = "divergence not measured yet"
        elif self.target is not None and predicted is not None and predicted > self.target:
            reason = "predicted divergence above target"
        elif record.usual.foreign(state.novelty(source), self.foreign, self.spreads):
            reason = "foreign text"
        elif self.dense_share is not None and record.dense_share < self.dense_share:
            reason = "dense share"
        if reason is not None:
            return Verdict(False, reason, teach=True, predicted=predicted)
        return Verdict(True, "within target" if self.target is not None else "correction holds", predicted=predicted)
