"""May a segment be reused at all?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from kvbaton.correctors.base import EdgeState
from kvbaton.correctors.messages_state import MessageState
from kvbaton.correctors.record import Recorded
from kvbaton.correctors.residuals import ResidualState
from kvbaton.errors import UsageError
from kvbaton.kv import KV


@dataclass(frozen=True)
class Verdict:
    """A gate's answer. ``teach``: a dense hop would teach something that is needed, so the whole hop should go dense;
    otherwise a refused segment is recomputed by itself. ``predicted``: divergence expected, nats a token, if known."""

    accept: bool
    reason: str
    teach: bool = False
    predicted: float | None = None


class Gate(Protocol):
    """Judges one segment before it is reused."""

    def judge(self, state: EdgeState | None, source: KV, start: int) -> Verdict:
        """``state``: what was learned on the edge, if anything; ``start``: position the segment would be used at."""
        ...


@dataclass(frozen=True)
class Always:
    """Reuse whatever is there."""

    def judge(self, state: EdgeState | None, source: KV, start: int) -> Verdict:
        return Verdict(True, "always")


@dataclass(frozen=True)
class Never:
    """Dense prefill, always."""

    def judge(self, state: EdgeState | None, source: KV, start: int) -> Verdict:
        return Verdict(False, "never", teach=True)


@dataclass(frozen=True)
class ExactKey:
    """Reuse only a text whose residual is stored; any other goes dense, which counts as a sighting. GraphFlow."""

    def judge(self, state: EdgeState | None, source: KV, start: int) -> Verdict:
        if isinstance(state, ResidualState) and source.token_ids in state.held:
            return Verdict(True, "exact relation")
        return Verdict(False, "relation not stored", teach=True)


@dataclass(frozen=True)
class Residual:
    """Ours: reuse where the correction has proved itself on this edge's dense hops; elsewhere go dense, and learn.

    Every refusal asks for a dense hop, because a dense hop is what it takes to mend the reason: it is measured before
    it is learned from. In this order:

    - the correction leaves as much error as it takes away, out of sample (where there is any error worth the name);
    - ``target``: the predicted divergence of reuse is above it, nats a token, or none was measured yet;
    - the text is more than ``foreign`` times as unlike the texts learned as those were when they were new;
    - ``dense_share``: fewer of the edge's hops than that were dense so far.

    Needs a corrector whose state keeps a record, such as `Affine`. Rule and measurements:
    docs/decisions/0002-residual-gate.md.
    """

    target: float | None = None
    dense_share: float | None = None
    foreign: float = 1.2

    def __post_init__(self) -> None:
        if self.target is not None and self.target < 0:
            raise UsageError(f"target is a divergence in nats a token, 0 or more, got {self.target}")
        if self.dense_share is not None and not 0 <= self.dense_share <= 1:
            raise UsageError(f"dense_share is a ratio from 0 to 1, got {self.dense_share}")
        if self.foreign <= 0:
            raise UsageError(f"foreign is a ratio above 0, got {self.foreign}")

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
        elif record.unlike(state.novelty(source)) > self.foreign:
            reason = "foreign text"
        elif self.dense_share is not None and record.dense_share < self.dense_share:
            reason = "dense share"
        if reason is not None:
            return Verdict(False, reason, teach=True, predicted=predicted)
        return Verdict(True, "within target" if self.target is not None else "correction holds", predicted=predicted)


@dataclass(frozen=True)
class MessageEntropy:
    """Reuse a text that one earlier message is clearly nearest to: entropy of their closeness at most ``gamma`` of its
    largest value. A text longer than all but one message, or with fewer than two to compare, goes dense. KVCOMM."""

    gamma: float = 0.3

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise UsageError(f"gamma is a share of the largest entropy, from 0 to 1, got {self.gamma}")

    def judge(self, state: EdgeState | None, source: KV, start: int) -> Verdict:
        if not isinstance(state, MessageState) or len(state.usable(len(source))) < 2:
            return Verdict(False, "fewer than two messages as long", teach=True)
        weights = state.closeness(source).double()
        entropy = float(-(weights * weights.clamp_min(1e-40).log2()).sum())
        most = self.gamma * math.log2(len(weights))
        reason = f"entropy {entropy:.2f} {'<=' if entropy <= most else '>'} {most:.2f} bits"
        return Verdict(entropy <= most, reason, teach=entropy > most)
