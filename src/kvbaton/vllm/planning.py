"""Where a request's reusable rows lie, and what the next step may take of them. Pure arithmetic on positions.

    prompt      [ own ][ l l · · · · · · · ][ own ][ l l · · · · ][ own ]      l: leading rows, computed
    pieces             └─  ^ reused rows ^ ┘          └─ reused ─┘
    stock scheduler    one claim from the start: ends at the first row that must be computed
    gap-jump           a chunk ends where a piece starts; there the request jumps to the piece's end
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvbaton.errors import InvariantError
from kvbaton.prompt import Prompt, Segment, Span
from kvbaton.recipes import Recipe
from kvbaton.selectors.base import ReusedRows
from kvbaton.vllm.matching import Match
from kvbaton.vllm.options import leading_rows
from kvbaton.vllm.wire import Shared


@dataclass(frozen=True)
class Piece:
    """Rows ``span`` that segment ``segment`` (its index among the prompt's shared segments) may reuse."""

    segment: int
    span: Span


def build_prompt(reader: str, token_ids: Sequence[int], shared: Sequence[Shared]) -> Prompt:
    """The prompt with ``shared`` (in order, disjoint) as its shared segments, everything else the reader's own."""
    ids, segments, at = tuple(token_ids), [], 0
    for part in shared:
        if part.start < at or part.end > len(ids):
            raise InvariantError(f"shared segment [{part.start}, {part.end}) overlaps another or leaves the prompt")
        if part.start > at:
            segments.append(Segment(ids[at:part.start]))
        segments.append(Segment(ids[part.start:part.end], part.share))
        at = part.end
    if at < len(ids):
        segments.append(Segment(ids[at:]))
    return Prompt(reader, tuple(segments))


def pieces_of(recipe: Recipe, layers: int, tokens: int, reused: Sequence[tuple[int, Span]]) -> list[Piece]:
    """The rows that ``reused`` segments (number, span) reuse after lead rows and the selector took theirs.

    The last of ``tokens`` prompt rows is never reused: it gives the first token. Raises Unsupported (`leading_rows`).
    """
    positions: list[int] = []
    offsets: list[int] = []
    numbers: list[int] = []
    kept: list[tuple[int, Span]] = []
    for number, span in reused:
        rows = range(min(recipe.lead_rows, len(span)), len(span) - (span.end == tokens))
        if not rows:
            continue
        numbers += [len(kept)] * len(rows)
        kept.append((number, span))
        offsets += rows
        positions += [span.start + row for row in rows]
    at, offset, segment = (torch.tensor(x, dtype=torch.int64) for x in (positions, offsets, numbers))
    leads = leading_rows(recipe, ReusedRows(at, offset, segment, layers))
    ends = [min(span.end, tokens - 1) for _, span in kept]
    return [Piece(number, Span(span.start + lead, end))
            for (number, span), lead, end in zip(kept, leads, ends, strict=True) if span.start + lead < end]


def reach(pieces: Sequence[Piece], at: int) -> int:
    """How far one can go from position ``at`` without computing a row."""
    for piece in pieces:
        if piece.span.start <= at < piece.span.end:
            at = piece.span.end
    return at


def chunk_end(pieces: Sequence[Piece], at: int, tokens: int) -> int:
    """Where a chunk of ``tokens`` rows from ``at`` ends: at the next piece, if one starts inside it."""
    starts = [piece.span.start for piece in pieces if at < piece.span.start < at + tokens]
    return min(starts, default=at + tokens)


def cut(pieces: Sequence[Piece], start: int, end: int) -> Iterator[Piece]:
    """The parts of ``pieces`` inside ``[start, end)``."""
    for piece in pieces:
        low, high = max(piece.span.start, start), min(piece.span.end, end)
        if low < high:
            yield Piece(piece.segment, Span(low, high))


def gaps(matches: Sequence[Match], tokens: int, shortest: int) -> list[Span]:
    """The stretches of at least ``shortest`` tokens that no match covers."""
    out, at = [], 0
    for start, end in (*((m.start, m.end) for m in matches), (tokens, tokens)):
        if start - at >= shortest:
            out.append(Span(at, start))
        at = end
    return out
