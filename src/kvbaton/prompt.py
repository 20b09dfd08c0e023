"""Segment, Prompt, Span, Place and Edge: what a prompt is made of, and whose it is.

    segments   [ own text ][ share: question ][ own ][ share: solver ][ own ]
    spans      [0,       9)[9,            74)[74,81)[81,         140)[140,147)
                  prefix       reused from the       computed behind the
               (prefix cache)  agent before          shared text, exactly
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from kvbaton.errors import UsageError


@dataclass(frozen=True, order=True)
class Span:
    """Half-open range of token positions ``[start, end)`` in one prompt."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Place:
    """Where a reader meets a text that is corrected: its first position ``start``, and the tokens of all texts that
    the hop corrects, this one among them."""

    start: int
    corrected: int


@dataclass(frozen=True)
class Segment:
    """A run of token ids. ``share`` names the placeholder it fills; None is the agent's own text."""

    token_ids: tuple[int, ...]
    share: str | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise UsageError("a segment needs at least one token: leave empty text out of the prompt")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def owner(self) -> str | None:
        """The share without its round: ``solver@-1`` and ``solver`` are texts of one owner."""
        return None if self.share is None else self.share.partition("@")[0]

    @cached_property
    def key(self) -> str:
        """Content key: 128-bit hash of the ids (for logs and files; lookups compare ids)."""
        return hashlib.blake2b(array("q", self.token_ids).tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, order=True)
class Edge:
    """What learned state belongs to: text of ``share`` moving from ``source`` to ``reader``.

    ``source`` and ``reader`` are roles (`Prompt.role`); ``slot`` counts repeats of one share in a prompt.
    """

    share: str
    source: str
    reader: str
    slot: int = 0

    def __str__(self) -> str:
        slot = f"#{self.slot}" if self.slot else ""
        return f"{self.share}{slot}: {self.source} -> {self.reader}"


def agent_of(role: str) -> str:
    """Name of the agent that has this `Prompt.role`."""
    return role.partition("~")[0]


@dataclass(frozen=True)
class Prompt:
    """One agent's whole prompt. No token exists outside a segment.

    ``template``: short hash of the templates it was made from, where there were any.
    """

    reader: str
    segments: tuple[Segment, ...]
    template: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.segments:
            raise UsageError(f"the prompt of {self.reader!r} is empty")

    def __len__(self) -> int:
        return sum(len(s) for s in self.segments)

    @property
    def role(self) -> str:
        """The reader under this template, ``critic~1f0c2a9e``: what is learned belongs to it, so that an agent whose
        role prompt was changed starts anew."""
        return f"{self.reader}~{self.template}" if self.template else self.reader

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(t for s in self.segments for t in s.token_ids)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """One half-open span a segment, in order, without gaps."""
        out, at = [], 0
        for segment in self.segments:
            out.append(Span(at, at + len(segment)))
            at += len(segment)
        return tuple(out)

    def shared(self) -> Iterator[tuple[int, Segment, Span, int]]:
        """``(index, segment, span, slot)`` of every shared segment; slot counts repeats of a share."""
        seen: dict[str, int] = {}
        for i, (segment, span) in enumerate(zip(self.segments, self.spans, strict=True)):
            if segment.share is not None:
                slot = seen.get(segment.share, 0)
                seen[segment.share] = slot + 1
                yield i, segment, span, slot

    def own_behind(self) -> Iterator[tuple[int, Segment, Span]]:
        """``(index, segment, span)`` of the agent's own text behind the first shared segment."""
        for i, (segment, span) in enumerate(zip(self.segments, self.spans, strict=True)):
            if segment.share is None and span.start >= self.prefix_tokens:
                yield i, segment, span

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the agent's own text before the first shared segment."""
        return next((span.start for _, _, span, _ in self.shared()), len(self))
