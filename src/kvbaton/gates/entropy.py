"""Gates that reuse a text where one earlier text is clearly nearest to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from kvbaton.correctors.anchors_state import AnchorState
from kvbaton.correctors.base import EdgeState
from kvbaton.correctors.messages_state import MessageState
from kvbaton.errors import UsageError
from kvbaton.gates.base import Verdict
from kvbaton.kv import KV


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
        return _by_entropy(state.closeness(source), self.gamma)


@dataclass(frozen=True)
class Entropy:
    """Reuse a text that one anchor is clearly nearest to: entropy of softmax(-distance) at most ``tau`` of its largest
    value, over the edge's own anchors that are at least as long. Fewer than two of them: dense. KVCMAS, section 2.5.

    Distance is L2 over all values above layer 0, scaled as if every text had ``reference_tokens`` tokens, so that one
    ``tau`` serves short and long texts. None: unscaled as in KVCMAS's release, where ``tau`` has to follow the length.
    """

    tau: float = 0.3
    reference_tokens: int | None = 256

    def __post_init__(self) -> None:
        if not 0.0 <= self.tau <= 1.0:
            raise UsageError(f"tau is a share of the largest entropy, from 0 to 1, got {self.tau}")
        if self.reference_tokens is not None and self.reference_tokens < 1:
            raise UsageError(f"reference_tokens must be 1 or more, got {self.reference_tokens}")

    def judge(self, state: EdgeState | None, source: KV, start: int) -> Verdict:
        if not isinstance(state, AnchorState):
            return Verdict(False, "no anchor", teach=True)
        distances = state.value_distances(source)
        if len(distances) < 2:
            return Verdict(False, "fewer than two anchors as long", teach=True)
        if self.reference_tokens is not None:
            distances = distances * math.sqrt(self.reference_tokens / len(source))
        return _by_entropy((-distances).softmax(0), self.tau)


def _by_entropy(weights: Tensor, share: float) -> Verdict:
    """Accept weights ``[A]`` whose entropy is at most ``share`` of that of A equal ones."""
    weights = weights.double()
    entropy = float(-(weights * weights.clamp_min(1e-40).log2()).sum())
    most = share * math.log2(len(weights))
    reason = f"entropy {entropy:.2f} {'<=' if entropy <= most else '>'} {most:.2f} bits"
    return Verdict(entropy <= most, reason, teach=entropy > most)
