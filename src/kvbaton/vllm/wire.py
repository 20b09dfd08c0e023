"""What passes between the two roles: everything here is pickled, so plain numbers, texts and tuples only.

    scheduler role --StepOrders--> worker role        judge, capture, teach, load, drop
    scheduler role <--StepReport-- worker role        verdicts, refused loads, what was learned

A worker carries orders out in a fixed order: capture and teach copy rows that earlier steps computed, before this
step's loads and forward pass can overwrite a freed block; judge and load follow; drop comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvbaton.prompt import Edge, Place
from kvbaton.vllm.options import Method


@dataclass(frozen=True)
class Lane:
    """Who may share: requests of one group under one method. Nothing crosses lanes."""

    group: str
    method: Method


@dataclass(frozen=True)
class Source:
    """Rows ``[offset, offset + n)`` of a stored text, as the source of a segment of n tokens."""

    text: int
    offset: int


@dataclass(frozen=True)
class Shared:
    """One shared segment of a prompt. ``share`` names it; ``slot`` is counted by `Prompt.shared`."""

    start: int
    end: int
    share: str
    source: Source | None


@dataclass(frozen=True)
class Judge:
    """Decide a prompt's shared segments, as `plan.make_plan` does. ``token_ids``: the whole prompt."""

    request: str
    lane: Lane
    reader: str
    token_ids: tuple[int, ...]
    shared: tuple[Shared, ...]


@dataclass(frozen=True)
class Verdict:
    """What the plan says about one shared segment."""

    action: str
    reason: str
    edge: Edge | None = None
    predicted: float | None = None

    @property
    def reused(self) -> bool:
        return self.action != "recompute"


@dataclass(frozen=True)
class Capture:
    """Copy rows at ``slots`` out of the cache and keep them, unrotated, as text ``text``."""

    text: int
    lane: Lane
    token_ids: tuple[int, ...]
    source: str
    start: int
    exact: bool
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Teach:
    """Learn an edge from a stored source and the exact rows at ``slots``."""

    lane: Lane
    edge: Edge
    source: Source
    start: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """Write rows ``[first, first + len(slots))`` of a segment into ``slots``; ``blocks`` are reported on refusal.

    ``tokens``: length of the segment; ``place``: where it stands. ``edge`` None: moved as it is.
    """

    request: str
    segment: int
    lane: Lane
    source: Source
    tokens: int
    place: Place
    first: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    edge: Edge | None


@dataclass(frozen=True)
class StepOrders:
    """One step's orders. ``closed``: lanes whose learned state may go; ``finished``: requests whose blocks may be
    freed once their captures are done."""

    captures: tuple[Capture, ...] = ()
    teaches: tuple[Teach, ...] = ()
    judges: tuple[Judge, ...] = ()
    loads: tuple[Load, ...] = ()
    drops: tuple[int, ...] = ()
    closed: tuple[Lane, ...] = ()
    finished: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LaneReport:
    """Learned state of one lane: edges, texts they learned from, bytes."""

    edges: int
    texts: int
    nbytes: int


@dataclass(frozen=True)
class StepReport:
    """What a worker tells the scheduler after a step. ``refused``: (request, segment) -> reason."""

    verdicts: Mapping[str, tuple[Verdict, ...]] = field(default_factory=dict)
    refused: Mapping[tuple[str, int], str] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    lanes: Mapping[Lane, LaneReport] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.verdicts or self.refused or self.lost or self.lanes)

    def merged(self, other: StepReport) -> StepReport:
        """What two workers say together: a segment is reused only if both reuse it."""
        verdicts = {**self.verdicts, **other.verdicts}
        for request in self.verdicts.keys() & other.verdicts.keys():
            pairs = zip(self.verdicts[request], other.verdicts[request], strict=True)
            verdicts[request] = tuple(a if not a.reused else replace(b, predicted=_largest(a.predicted, b.predicted))
                                      for a, b in pairs)
        lanes = {**self.lanes, **other.lanes}
        for lane in self.lanes.keys() & other.lanes.keys():
            a, b = self.lanes[lane], other.lanes[lane]
            lanes[lane] = LaneReport(max(a.edges, b.edges), max(a.texts, b.texts), a.nbytes + b.nbytes)
        return StepReport(verdicts, {**self.refused, **other.refused}, self.lost | other.lost, lanes)


def _largest(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)
