"""Messages: full-size offsets of earlier texts, mixed by closeness. KVCOMM, https://arxiv.org/abs/2510.12872.

Two kinds of text are corrected, each with weights of its own (K and V apart, temperature 1):

    shared text            token t of message m weighs softmax(-mean |x[t] - x_m[t]|), over layers, heads, channels
    own text right behind  message m weighs softmax(-|x - x_m| over tokens), by layer, head and channel of the
                           shared text in front

Layer 0 depends on token and position alone and is left as it is. Offsets are of unrotated keys, so they hold at any
position; `AbsoluteMessages` is the released code's form, which holds only where a text stands as it stood then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from kvbaton.correctors.base import Correction, EdgeState, LayerKV, Turn, no_reveal
from kvbaton.correctors.messages_state import Message, MessageState
from kvbaton.errors import UsageError
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Place

Weights: TypeAlias = tuple[Tensor, Tensor]
"""Weights of A messages for keys and for values: ``[A, T]`` by token or ``[A, L, H, D]`` by channel."""


@dataclass(frozen=True)
class Messages:
    """Hold ``pool`` messages an edge; see the module's head. ``KV.before`` tells own text behind shared text."""

    pool: int = 20
    learns: ClassVar[bool] = True
    needs_truth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.pool < 1:
            raise UsageError(f"Messages needs a pool of 1 or more, got {self.pool}")

    def new_state(self, geometry: Geometry) -> MessageState:
        return MessageState(geometry, self.pool)

    def can_correct(self, state: EdgeState | None, source: KV) -> bool:
        return isinstance(state, MessageState) and bool(state.usable(len(source.before or source)))

    def correct(self, state: EdgeState, source: KV, place: Place) -> Correction:
        """Also counts a use of the nearest messages, by which the pool forgets."""
        assert isinstance(state, MessageState)
        messages, weights = self._prepare(state, source)
        return lambda layer: _mix(messages, weights, source, layer)

    def learn(self, state: EdgeState, source: KV, target: KV) -> None:
        assert isinstance(state, MessageState)
        text = source.before or source
        state.add(text.token_ids, Message(text.k, text.v, target.k - source.k, target.v - source.v, target.start))

    def reveal(self, truth: KV, source: KV) -> EdgeState:
        return no_reveal(truth, source)

    def _prepare(self, state: MessageState, source: KV) -> tuple[list[Message], Weights]:
        text = source.before or source
        messages = [message for _, message in state.usable(len(text))]
        state.credit(text)
        return messages, _by_token(messages, text) if source.before is None else _by_channel(messages, text)


@dataclass(frozen=True)
class AbsoluteMessages(Messages):
    """As the released code: key offsets stay rotated to where they were made. For parity only."""

    def correct_turned(self, state: EdgeState, source: KV, place: Place, turn: Turn) -> Correction:
        """`correct`, with ``turn`` of the model at hand."""
        assert isinstance(state, MessageState)
        messages, weights = self._prepare(state, source)
        return lambda layer: _mix(messages, weights, source, layer,
                                  lambda dk, message: turn(dk, message.start - place.start, layer))


def _by_token(messages: list[Message], text: KV) -> Weights:
    """``[A, T]``: how near each message is, token by token, averaged over layers, heads and channels."""
    def of(side: str) -> Tensor:
        own = getattr(text, side).float()
        return torch.stack([(own - getattr(m, side)[:, :, :len(text)].float()).abs().mean((0, 1, 3)) for m in messages])

    return torch.softmax(-of("k"), 0), torch.softmax(-of("v"), 0)


def _by_channel(messages: list[Message], text: KV) -> Weights:
    """``[A, L, H, D]``: how near each message's last tokens are, by layer, head and channel."""
    def of(side: str) -> Tensor:
        own = getattr(text, side).float()
        return torch.stack([(own - getattr(m, side)[:, :, len(m) - len(text):].float()).norm(dim=2) for m in messages])

    return torch.softmax(-of("k"), 0), torch.softmax(-of("v"), 0)


def _mix(messages: list[Message], weights: Weights, source: KV, layer: int,
         place: Callable[[Tensor, Message], Tensor] = lambda dk, message: dk) -> LayerKV:
    """Keys and values ``[H, T, D]`` of ``layer`` plus the weighted offsets."""
    if layer == 0:
        return source.k[0], source.v[0]
    tokens, k, v = len(source), source.k[layer].float(), source.v[layer].float()
    for i, message in enumerate(messages):
        wk, wv = (w[i][None, :, None] if w.ndim == 2 else w[i, layer][:, None, :] for w in weights)
        k = k + wk * place(message.dk[layer, :, :tokens].float(), message)
        v = v + wv * message.dv[layer, :, :tokens].float()
    return k.to(source.k.dtype), v.to(source.v.dtype)
