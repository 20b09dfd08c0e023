"""What a gate is: it says whether a segment may be reused at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvbaton.correctors.base import EdgeState
from kvbaton.correctors.residuals import ResidualState
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
