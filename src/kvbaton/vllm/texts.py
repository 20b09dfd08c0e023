"""The books of stored texts: which lane holds which text, what to capture, what to drop.

The scheduler role keeps the books, worker roles hold the tensors. What a hop leaves behind is decided by the recipe's
own `Reference`, asked with tickets (KV without rows) in place of tensors.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from kvbaton.kv import KV
from kvbaton.prompt import Segment
from kvbaton.references import Reference, RunStore
from kvbaton.vllm.matching import TextIndex
from kvbaton.vllm.wire import Lane


@dataclass(frozen=True)
class Text:
    """A stored text: ``start`` is the position of its first token where ``source`` (a role) computed it."""

    id: int
    lane: Lane
    segment: Segment
    source: str
    start: int
    exact: bool

    @property
    def tokens(self) -> int:
        return len(self.segment)


class _Tickets(RunStore):
    def drop(self, segment: Segment) -> None:
        self._held.pop(self._key(segment), None)


@dataclass
class _LaneBooks:
    index: TextIndex
    tickets: _Tickets = field(default_factory=_Tickets)
    by_ids: dict[tuple[int, ...], dict[str, int]] = field(default_factory=lambda: defaultdict(dict))


class TextBooks:
    """Texts by lane inside one byte budget; the text used longest ago goes first, texts in use stay."""

    def __init__(self, budget_bytes: int, bytes_of: Callable[[int], int], window: int) -> None:
        self._budget, self._bytes_of, self._window = budget_bytes, bytes_of, window
        self._texts: OrderedDict[int, Text] = OrderedDict()
        self._lanes: dict[Lane, _LaneBooks] = {}
        self._pins: dict[int, int] = defaultdict(int)
        self._retired: set[int] = set()
        self._dropped: list[int] = []
        self._next = 0
        self.nbytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._texts)

    def get(self, text: int) -> Text | None:
        return self._texts.get(text)

    def _lane(self, lane: Lane) -> _LaneBooks:
        if lane not in self._lanes:
            self._lanes[lane] = _LaneBooks(TextIndex(self._window))
        return self._lanes[lane]

    def index(self, lane: Lane) -> TextIndex:
        """The lane's texts by content."""
        return self._lane(lane).index

    def named(self, lane: Lane, segment: Segment) -> Text | None:
        """The text of that owner with exactly these tokens."""
        text = self._lane(lane).by_ids.get(segment.token_ids, {}).get(segment.owner or "")
        return None if text is None else self._texts[text]

    def offer_read(self, lane: Lane, reference: Reference, segment: Segment, source: str, start: int,
                   exact: bool) -> Text | None:
        """A reader holds ``segment``: the new text to capture, or None if the reference does not want it."""
        return self._offer(lane, reference.read, segment, source, start, exact)

    def offer_written(self, lane: Lane, reference: Reference, segment: Segment, source: str, start: int,
                      exact: bool) -> Text | None:
        """An agent generated ``segment``: the new text to capture, or None."""
        return self._offer(lane, reference.wrote, segment, source, start, exact)

    def pin(self, texts: Iterable[int]) -> None:
        """Keep these texts until `unpin`; using a text also makes it the youngest."""
        for text in texts:
            self._pins[text] += 1
            if text in self._texts:
                self._texts.move_to_end(text)

    def unpin(self, texts: Iterable[int]) -> None:
        for text in texts:
            self._pins[text] -= 1
            if not self._pins[text]:
                del self._pins[text]
                if text in self._retired:
                    self._retired.discard(text)
                    self._dropped.append(text)
        self._shrink()

    def forget(self, text: int) -> None:
        """Take a text out of the books; its tensors are dropped once nobody uses it."""
        found = self._texts.pop(text, None)
        if found is None:
            return
        books = self._lane(found.lane)
        books.index.remove(text)
        books.tickets.drop(found.segment)
        owners = books.by_ids[found.segment.token_ids]
        owners.pop(found.segment.owner or "", None)
        if not owners:
            del books.by_ids[found.segment.token_ids]
        self.nbytes -= self._bytes_of(found.tokens)
        if text in self._pins:
            self._retired.add(text)
        else:
            self._dropped.append(text)

    def close(self, lane: Lane) -> None:
        """Forget everything of a lane that nobody uses any more."""
        for text in [text.id for text in self._texts.values() if text.lane == lane]:
            self.forget(text)
        self._lanes.pop(lane, None)

    def all_ids(self) -> tuple[int, ...]:
        """Every text in the books, the one used longest ago first."""
        return tuple(self._texts)

    def take_dropped(self) -> tuple[int, ...]:
        """Texts that workers may forget, since the last call."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _offer(self, lane: Lane, hand_on: Callable[[Segment, KV, RunStore], None], segment: Segment, source: str,
               start: int, exact: bool) -> Text | None:
        if self._bytes_of(len(segment)) > self._budget:
            return None
        books = self._lane(lane)
        before = books.tickets.get(segment)
        none = torch.empty(0, 0, 0, 0)
        hand_on(segment, KV(none, none, start, source, exact), books.tickets)
        if books.tickets.get(segment) is before:
            return None
        ticket = books.tickets.get(segment)
        known = self.named(lane, segment)
        if known is not None:
            self.forget(known.id)
            assert ticket is not None
            books.tickets.put(segment, ticket)
        text = Text(self._next, lane, segment, source, start, exact)
        self._next += 1
        self._texts[text.id] = text
        books.index.add(text.id, segment.token_ids)
        books.by_ids[segment.token_ids][segment.owner or ""] = text.id
        self.nbytes += self._bytes_of(text.tokens)
        self.pin([text.id])
        self._shrink()
        self.unpin([text.id])
        return text

    def _shrink(self) -> None:
        for text in list(self._texts):
            if self.nbytes <= self._budget:
                return
            if text not in self._pins:
                self.forget(text)
                self.evicted += 1
