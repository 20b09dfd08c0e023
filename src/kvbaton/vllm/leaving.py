"""What a hop leaves behind: lessons from its exact rows, captures of the text it read and wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbaton.prompt import Segment, Span
from kvbaton.references import Keep
from kvbaton.vllm.hop import FOUND_SHARE, Hop
from kvbaton.vllm.paging import slots_of
from kvbaton.vllm.texts import Text, TextBooks
from kvbaton.vllm.wire import Capture, Shared, Teach, Verdict


@dataclass
class Left:
    """Orders that wait for the next step. ``kept``: ended requests whose blocks must stay until then."""

    captures: list[Capture] = field(default_factory=list)
    teaches: list[Teach] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)


class Leavings:
    """Queues what ended and running hops leave, for the workers' next step. ``table``: a request's block ids."""

    def __init__(self, books: TextBooks, block_size: int) -> None:
        self._books, self._block_size = books, block_size
        self._left = Left()

    def take(self) -> Left:
        """What was queued since the last call."""
        left, self._left = self._left, Left()
        return left

    def end(self, hop: Hop, table: Sequence[int]) -> bool:
        """The hop ended well: queue all it leaves; whether its blocks are still needed."""
        queued = len(self._left.captures) + len(self._left.teaches)
        self.prompt(hop, table)
        self._output(hop, table)
        needed = len(self._left.captures) + len(self._left.teaches) > queued
        if needed:
            self._left.kept.add(hop.request.request_id)
        return needed

    def prompt(self, hop: Hop, table: Sequence[int]) -> None:
        """Queue what the prompt's exact rows teach, and the captures of its shared text, once."""
        if hop.captured or not hop.options.save:
            return
        hop.captured = True
        parts = list(enumerate(zip(hop.shared, hop.judged, strict=True)))
        held = [None if part.source is None else self._books.get(part.source.text) for part in hop.shared]
        for i, (part, verdict) in parts:
            if i in hop.refused or not verdict.reused:
                self._teach(hop, part, verdict, held[i], table)
        keeps = hop.lane.method.recipe().reference.keeps
        for i, (part, verdict) in parts:
            source, reused = held[i], verdict.reused and i not in hop.refused
            whole = source is None or source.tokens == part.end - part.start
            if whole and (Keep.REUSED_READS if reused else Keep.EXACT_READS) in keeps:
                self._read(hop, Span(part.start, part.end), part.share, table)
        for span in hop.new_text if Keep.EXACT_READS in keeps else ():
            self._read(hop, span, FOUND_SHARE, table)

    def _teach(self, hop: Hop, part: Shared, verdict: Verdict, source: Text | None, table: Sequence[int]) -> None:
        """Queue a lesson if the segment was computed exactly, from a source that may teach."""
        recipe = hop.lane.method.recipe()
        if (recipe.corrector.learns and part.end <= hop.exact_until and verdict.edge is not None
                and part.source is not None and source is not None and (source.exact or recipe.learn_approximate)):
            self._left.teaches.append(Teach(hop.lane, verdict.edge, part.source, part.start,
                                       tuple(slots_of(table, part.start, part.end, self._block_size))))

    def _read(self, hop: Hop, span: Span, share: str, table: Sequence[int]) -> None:
        """Offer text that this hop read to the recipe's reference; queue its capture if it is wanted."""
        segment = Segment(hop.prompt.token_ids[span.start:span.end], share)
        text = self._books.offer_read(hop.lane, hop.lane.method.recipe().reference, segment, hop.reader, span.start,
                                     exact=span.end <= hop.exact_until)
        self._capture(hop, text, table)

    def _output(self, hop: Hop, table: Sequence[int]) -> None:
        """Queue the capture of what the agent wrote; the last sampled token has no KV."""
        recipe, request = hop.lane.method.recipe(), hop.request
        held = min(request.num_computed_tokens, request.num_tokens - 1) - hop.tokens
        ids = tuple(request.all_token_ids[hop.tokens:hop.tokens + held])
        if held > 0 and hop.options.save and Keep.WRITTEN in recipe.reference.keeps:
            segment = Segment(ids, hop.options.output or hop.reader)
            self._capture(hop, self._books.offer_written(hop.lane, recipe.reference, segment, hop.reader, hop.tokens,
                                                        exact=not hop.pieces), table)

    def _capture(self, hop: Hop, text: Text | None, table: Sequence[int]) -> None:
        if text is not None:
            slots = slots_of(table, text.start, text.start + text.tokens, self._block_size)
            self._left.captures.append(Capture(text.id, hop.lane, text.segment.token_ids, text.source, text.start,
                                          text.exact, tuple(slots)))
