"""One request under KVBaton, as the scheduler role follows it from arrival to its end."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbaton.prompt import Prompt, Segment, Span
from kvbaton.vllm import planning
from kvbaton.vllm.matching import Match
from kvbaton.vllm.options import RequestOptions
from kvbaton.vllm.texts import TextBooks
from kvbaton.vllm.wire import Lane, Shared, Source, Verdict

FOUND_SHARE = "prompt"
"""Share of text that was found by content and that no agent wrote."""

NEVER = 2**62
"""A position behind every prompt."""


def role_of(options: RequestOptions, token_ids: Sequence[int], role_tokens: int) -> str:
    """The reader's role: its name if the client gave one, else a digest of its first tokens (its role prompt)."""
    if options.agent is not None:
        return options.agent
    return "role-" + hashlib.blake2b(array("q", token_ids[:role_tokens]).tobytes(), digest_size=6).hexdigest()


@dataclass
class Hop:
    """``verdicts`` None: not judged yet. ``load``: rows ``[start, end)`` that the coming step must bring in;
    ``loaded``: rows brought in since the last admission, by segment.
    ``cached_tokens``: prompt tokens that vLLM's own prefix cache gave at the last admission."""

    request: Any
    options: RequestOptions
    lane: Lane
    reader: str
    prompt: Prompt
    shared: tuple[Shared, ...]
    new_text: tuple[Span, ...]
    verdicts: tuple[Verdict, ...] | None = None
    pieces: list[planning.Piece] = field(default_factory=list)
    exact_until: int = NEVER
    claim_from: int = 0
    load: Span | None = None
    captured: bool = False
    loaded: dict[int, int] = field(default_factory=dict)
    cached_tokens: int = 0
    refused: dict[int, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.prompt)

    @property
    def loaded_tokens(self) -> int:
        """Prompt rows brought in since the last admission."""
        return sum(self.loaded.values())

    @property
    def sources(self) -> tuple[int, ...]:
        """Texts that this request may read: pinned until its end."""
        return tuple(part.source.text for part in self.shared if part.source is not None)

    @property
    def judged(self) -> tuple[Verdict, ...]:
        """The verdicts; of a hop that ended before it was judged, that nothing was reused."""
        return self.verdicts or tuple(Verdict("recompute", "not judged") for _ in self.shared)

    @property
    def reused(self) -> list[tuple[int, Span]]:
        """Segments the verdicts reuse, with their spans."""
        return [(i, Span(part.start, part.end)) for i, (part, verdict)
                in enumerate(zip(self.shared, self.judged, strict=True)) if verdict.reused]

    @property
    def corrected_tokens(self) -> int:
        """Tokens of all segments that the verdicts correct."""
        return sum(len(span) for i, span in self.reused if self.judged[i].action == "correct")

    def salt(self) -> str:
        """What a prefix-cache block of this hop holds besides exact KV: equal for two hops that reuse the same."""
        reuse = [(part.start, part.end, part.source, verdict.action, str(verdict.edge))
                 for part, verdict in zip(self.shared, self.judged, strict=True) if verdict.reused]
        return repr((self.lane, reuse, sorted(self.refused)))

    def summary(self) -> dict[str, Any]:
        """What the response and the log say about this hop."""
        found = [part for part in self.shared if part.source is not None]
        segments = []
        for i, (part, verdict) in enumerate(zip(self.shared, self.judged, strict=True)):
            refusal = self.refused.get(i)
            segments.append({
                "share": part.share, "start": part.start, "tokens": part.end - part.start,
                "loaded": self.loaded.get(i, 0),
                "action": "recompute" if refusal else verdict.action, "reason": refusal or verdict.reason,
                "source": verdict.edge.source if verdict.edge else None, "predicted": verdict.predicted})
        return {"group": self.lane.group, "method": str(self.lane.method), "agent": self.reader,
                "prompt_tokens": self.tokens, "found_segments": len(found), "loaded_tokens": self.loaded_tokens,
                "computed_tokens": max(0, self.tokens - self.loaded_tokens - self.cached_tokens),
                "cached_tokens": self.cached_tokens, "exact": not self.pieces, "segments": segments}

    def log_line(self, outcome: str) -> str:
        """One line of JSON."""
        return json.dumps({"event": "kvbaton_request", "request": self.request.request_id, "outcome": outcome,
                           **self.summary()}, separators=(",", ":"))


def find_marked(books: TextBooks, lane: Lane, options: RequestOptions, token_ids: Sequence[int]) -> list[Shared]:
    """The spans that the client marked, each with the stored text of the same owner and tokens, if there is one.

    The last token of a generated text may have been sampled without ever being fed: then its KV covers all but the
    last token of the span, which stays the reader's own.
    """
    found = []
    for mark in options.marks or ():
        start, end = mark.span.start, mark.span.end
        ids = tuple(token_ids[start:end])
        for tokens in (len(ids), len(ids) - 1):
            text = books.named(lane, Segment(ids[:tokens], mark.share)) if tokens else None
            if text is not None:
                found.append(Shared(start, start + tokens, mark.share, Source(text.id, 0)))
                break
        else:
            found.append(Shared(start, end, mark.share, None))
    return found


def find_content(books: TextBooks, lane: Lane, token_ids: Sequence[int]) -> tuple[list[Shared], list[Match]]:
    """Known text anywhere behind the first token, and every match, those at the very start too.

    A match at position 0 is the agent's own role prompt or a repeated prompt: vLLM's exact prefix cache serves it.
    """
    matches = books.index(lane).find(token_ids)
    shared = []
    for match in matches:
        text = books.get(match.text)
        if match.start and text is not None:
            shared.append(Shared(match.start, match.end, text.segment.share or FOUND_SHARE,
                                 Source(match.text, match.offset)))
    return shared, matches
