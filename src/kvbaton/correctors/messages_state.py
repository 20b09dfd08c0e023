"""MessageState: full-size offsets of the texts that one edge has seen. KVCOMM's anchor pool, one edge of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvbaton.errors import InvariantError, StoreError
from kvbaton.kv import KV, Geometry

WINDOW = 5
"""Of the oldest so many, the one used least is forgotten."""
CREDITED = 0.9
"""The nearest messages that carry this share of the weight are credited with a use."""

_SIDES = ("k", "v", "dk", "dv")


@dataclass(frozen=True)
class Message:
    """One text: what it is recognised by, and the offset that the reader's prefix gave it.

    ``k``, ``v`` ``[L, H, T, D]`` unrotated: the KV of the shared text as its source held it. ``dk``, ``dv``
    ``[L, H, T', D]``: offsets of that text, or of the reader's own text right behind it. ``start``: where the
    corrected text began then.
    """

    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor
    start: int
    uses: int = 0

    def __len__(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + self.dk.nbytes + self.dv.nbytes


@dataclass
class MessageState:
    """Messages by their ids, oldest first; at most ``pool`` of them."""

    geometry: Geometry
    pool: int
    held: dict[tuple[int, ...], Message] = field(default_factory=dict)
    _near: tuple[Tensor, Tensor] | None = None
    """The latest text's values and its closeness: the gate asks first, then the correction."""

    @property
    def nbytes(self) -> int:
        return sum(message.nbytes for message in self.held.values())

    @property
    def texts(self) -> int:
        return len(self.held)

    def add(self, ids: tuple[int, ...], message: Message) -> None:
        """Hold a message; the one of the same ids is replaced, and one is forgotten if the pool is full."""
        self.held.pop(ids, None)
        if len(self.held) >= self.pool:
            oldest = list(self.held)[:WINDOW]
            del self.held[min(oldest, key=lambda key: self.held[key].uses)]
        self.held[ids] = message
        self._near = None

    def usable(self, tokens: int) -> list[tuple[tuple[int, ...], Message]]:
        """Messages at least as long as ``tokens``."""
        return [(ids, message) for ids, message in self.held.items() if len(message) >= tokens]

    def closeness(self, text: KV) -> Tensor:
        """Weight of every usable message ``[A]``: softmax of minus the distance of all values. KVCOMM, section 5."""
        if self._near is None or self._near[0] is not text.v:
            values = text.v.float()
            distances = [torch.linalg.vector_norm(values - message.v[:, :, :len(text)].float())
                         for _, message in self.usable(len(text))]
            self._near = text.v, torch.softmax(-torch.stack(distances), 0) if distances else values.new_empty(0)
        return self._near[1]

    def credit(self, text: KV) -> None:
        """Count a use of the nearest messages."""
        weights = self.closeness(text)
        usable = self.usable(len(text))
        before = 0.0
        for i in torch.argsort(weights, descending=True).tolist():
            if before >= CREDITED:
                break
            before += float(weights[i])
            ids, message = usable[i]
            self.held[ids] = replace(message, uses=message.uses + 1)

    def merge(self, other: Any) -> None:
        for ids, message in other.held.items():
            if ids not in self.held:
                self.add(ids, message)

    def to_tensors(self) -> Mapping[str, Tensor]:
        out = {}
        for i, (ids, message) in enumerate(self.held.items()):
            out[f"message{i}.ids"] = torch.tensor(ids, dtype=torch.int64)
            out[f"message{i}.counts"] = torch.tensor([message.start, message.uses])
            out |= {f"message{i}.{side}": getattr(message, side) for side in _SIDES}
        return out

    def from_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        count = sum(name.endswith(".ids") for name in tensors)
        try:
            for i in range(count):
                start, uses = tensors[f"message{i}.counts"].tolist()
                k, v, dk, dv = (tensors[f"message{i}.{side}"] for side in _SIDES)
                self.held[tuple(tensors[f"message{i}.ids"].tolist())] = Message(k, v, dk, dv, start, uses)
            self.check()
        except (KeyError, TypeError, ValueError, InvariantError) as error:
            raise StoreError(f"stored messages are broken: {error}") from error

    def check(self) -> None:
        shape = self.geometry.layers, self.geometry.kv_heads, self.geometry.head_dim
        if len(self.held) > self.pool:
            raise InvariantError(f"{len(self.held)} messages are held, the pool is {self.pool}")
        for message in self.held.values():
            for side in _SIDES:
                tensor = getattr(message, side)
                if tensor.ndim != 4 or (tensor.shape[0], tensor.shape[1], tensor.shape[3]) != shape:
                    raise InvariantError(f"a message has {side} of shape {tuple(tensor.shape)}")
                if not torch.isfinite(tensor).all():
                    raise InvariantError(f"a message has {side} that is not finite")
            if message.k.shape != message.v.shape or message.dk.shape != message.dv.shape:
                raise InvariantError("a message has keys and values of different shapes")
