"""How an answer comes about: generated token by token, or forced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvbaton.errors import UsageError


class Sampler(Protocol):
    """Picks tokens. `begin` gives a fresh picker for one answer, so that a seed means the same in every hop."""

    def begin(self) -> Picker: ...


class Picker(Protocol):
    def pick(self, logits: Tensor) -> int:
        """A token id from logits ``[vocab]``."""
        ...


@dataclass(frozen=True)
class Greedy:
    """The most likely token; the first of equals."""

    def begin(self) -> Picker:
        return self

    def pick(self, logits: Tensor) -> int:
        return int(logits.argmax())


@dataclass(frozen=True)
class Sampled:
    """Temperature, then top-k, then top-p sampling from one seed an answer."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise UsageError(f"temperature must be above 0, got {self.temperature}: use Greedy() for no sampling")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k must be 1 or more, got {self.top_k}")

    def begin(self) -> Picker:
        return _SeededPicker(self, torch.Generator().manual_seed(self.seed))


@dataclass
class _SeededPicker:
    how: Sampled
    generator: torch.Generator

    def pick(self, logits: Tensor) -> int:
        scores, ids = (logits.float().cpu() / self.how.temperature).sort(descending=True)
        probs = scores.softmax(-1)
        keep = probs.cumsum(-1) - probs < self.how.top_p
        if self.how.top_k is not None:
            keep[self.how.top_k:] = False
        chosen = torch.multinomial(probs * keep, 1, generator=self.generator)
        return int(ids[chosen])


@dataclass(frozen=True)
class Generate:
    """Generate until a stop token (the engine's own end-of-turn tokens and ``stop_ids``) or the limit."""

    max_new_tokens: int = 128
    sampler: Sampler = field(default_factory=Greedy)
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be 1 or more, got {self.max_new_tokens}")

    @property
    def max_tokens(self) -> int:
        """Cache slots that the answer may take."""
        return self.max_new_tokens


@dataclass(frozen=True)
class Force:
    """Teacher forcing: these ids are the answer; its logits come back with the result.

    ``beside``: other answers behind the same prefill. Their logits come back too, and nothing else is left of them.
    """

    ids: tuple[int, ...]
    beside: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not all((self.ids, *self.beside)):
            raise UsageError("a forced answer needs at least one token")

    @property
    def max_tokens(self) -> int:
        """Cache slots that the longest answer takes."""
        return max(map(len, (self.ids, *self.beside)))
