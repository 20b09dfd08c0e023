"""KV: the keys and values of one span, and Geometry, the shape they must have.

Dimension letters: **L** layers, **H** KV heads, **T** tokens, **D** head dim.
Keys are stored **unrotated** (position-free): a key is rotated once, to where it is used, never twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbaton.errors import InvariantError


@dataclass(frozen=True)
class Geometry:
    """Shape of a model's KV cache."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def nbytes(self, tokens: int) -> int:
        """Bytes of keys and values for ``tokens`` tokens."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * self.dtype.itemsize

    def empty(self, tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """Uninitialised ``[L, H, T, D]``."""
        return torch.empty(self.layers, self.kv_heads, tokens, self.head_dim, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class KV:
    """Keys and values of one span as some agent held them.

    ``k`` (unrotated) and ``v``: ``[L, H, T, D]``, read-only to everyone who did not allocate them.
    ``start``: position of the first token where the values were computed.
    ``source``: role of the agent that held them; ``exact``: nothing before them was reused.
    ``boundary``: hidden states ``[T, hidden]`` by layer, where a method asked for them at capture.
    ``token_ids``: whose KV this is, set when a run stores it; lookups by text compare ids.
    ``before``: for an agent's own text, the source of the shared text right in front of it (PrivateText.ANCHORED).
    """

    k: Tensor
    v: Tensor
    start: int
    source: str
    exact: bool
    boundary: tuple[tuple[int, Tensor], ...] = ()
    token_ids: tuple[int, ...] = ()
    before: KV | None = None

    def __post_init__(self) -> None:
        if self.k.shape != self.v.shape or self.k.ndim != 4:
            raise InvariantError(f"KV needs k and v of one shape [L, H, T, D], got {self.k.shape}, {self.v.shape}")

    def __len__(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + sum(h.nbytes for _, h in self.boundary)

    @property
    def geometry(self) -> Geometry:
        layers, heads, _, dim = self.k.shape
        return Geometry(layers, heads, dim, self.k.dtype)

    def hidden_at(self, layer: int) -> Tensor | None:
        """Hidden states ``[T, hidden]`` that entered ``layer``, if they were kept."""
        return dict(self.boundary).get(layer)

    def rows(self, start: int, end: int) -> KV:
        """The tokens ``[start, end)`` of this span, as views."""
        boundary = tuple((layer, h[start:end]) for layer, h in self.boundary)
        return replace(self, k=self.k[:, :, start:end], v=self.v[:, :, start:end], start=self.start + start,
                       boundary=boundary, token_ids=self.token_ids[start:end])
