"""Divergence: how far a method's next tokens are from dense prefill's, on one given answer."""

from __future__ import annotations

from torch import Tensor


def divergence(dense: Tensor, other: Tensor) -> float:
    """KL(dense || other), nats a token, from the logits ``[m, vocab]`` of both at each of the answer's m tokens."""
    p, q = dense.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean().clamp_min(0.0))
