"""Which KV a shared segment starts from.

    Chained    what the agent that ran before holds: replaced after every hop
    Origin     what the first exact owner (or the writer) made: never replaced
    Isolated   the text encoded alone, without any context
    Nothing    no KV is kept: the reference of the dense method
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import ClassVar, Protocol

from kvbaton.kv import KV
from kvbaton.prompt import Segment

ALONE = "(alone)"
"""Source role of a KV that was encoded without context."""


@dataclass
class RunStore:
    """KV of shared text held during one run, by owner and token ids (ids are compared, never only hashed)."""

    _held: dict[tuple[str, tuple[int, ...]], KV] = field(default_factory=dict)

    @staticmethod
    def _key(segment: Segment) -> tuple[str, tuple[int, ...]]:
        return segment.owner or "", segment.token_ids

    def get(self, segment: Segment) -> KV | None:
        return self._held.get(self._key(segment))

    def put(self, segment: Segment, kv: KV) -> None:
        self._held[self._key(segment)] = replace(kv, token_ids=segment.token_ids[:len(kv)])

    def clear(self) -> None:
        self._held.clear()

    @property
    def nbytes(self) -> int:
        return sum(kv.nbytes for kv in {id(kv.k): kv for kv in self._held.values()}.values())

    @property
    def boundary_bytes(self) -> int:
        """Bytes of kept hidden states, inside `nbytes`."""
        return sum(h.nbytes for kv in {id(kv.k): kv for kv in self._held.values()}.values() for _, h in kv.boundary)


class Keep(Enum):
    """What a reference wants to be handed after a hop; the engine materialises nothing else."""

    EXACT_READS = auto()
    """KV of shared text that a reader computed itself."""
    REUSED_READS = auto()
    """KV of shared text that a reader holds after reusing it (corrected, partly recomputed)."""
    WRITTEN = auto()
    """Decode-time KV of generated text."""


class Reference(Protocol):
    """Where the KV of a shared segment comes from and what each hop leaves behind."""

    @property
    def encodes_alone(self) -> bool:
        """True: the engine encodes a text that nobody holds by itself and publishes it with `encoded`."""
        ...

    @property
    def lead_tokens(self) -> int:
        """Tokens of the reader's prompt that stand in front of a text while it is encoded alone."""
        ...

    @property
    def keeps(self) -> frozenset[Keep]: ...

    @property
    def absent(self) -> str:
        """The reason to give where `resolve` finds nothing."""
        ...

    def resolve(self, segment: Segment, run: RunStore) -> KV | None:
        """The KV to start from; None: nobody holds it yet."""
        ...

    def encoded(self, segment: Segment, alone: KV, run: RunStore) -> None:
        """The text was encoded alone."""
        ...

    def read(self, segment: Segment, held: KV, run: RunStore) -> None:
        """An agent read the text and holds it as ``held``."""
        ...

    def wrote(self, segment: Segment, held: KV, run: RunStore) -> None:
        """An agent generated the text; ``held`` is its decode-time KV (the last sampled token has none)."""
        ...


@dataclass(frozen=True)
class Chained:
    """What the agent that ran before holds; a writer's own KV until its first reader. KVCMAS, section 3."""

    encodes_alone: ClassVar[bool] = False
    lead_tokens: ClassVar[int] = 0
    keeps: ClassVar[frozenset[Keep]] = frozenset(Keep)
    absent: ClassVar[str] = "first hop"

    def resolve(self, segment: Segment, run: RunStore) -> KV | None:
        return run.get(segment)

    def encoded(self, segment: Segment, alone: KV, run: RunStore) -> None: ...

    def read(self, segment: Segment, held: KV, run: RunStore) -> None:
        run.put(segment, held)

    def wrote(self, segment: Segment, held: KV, run: RunStore) -> None:
        run.put(segment, held)


@dataclass(frozen=True)
class Origin:
    """What the first exact owner made (for generated text: the writer); an inexact one is kept until then."""

    encodes_alone: ClassVar[bool] = False
    lead_tokens: ClassVar[int] = 0
    keeps: ClassVar[frozenset[Keep]] = frozenset({Keep.EXACT_READS, Keep.WRITTEN})
    absent: ClassVar[str] = "first hop"

    def resolve(self, segment: Segment, run: RunStore) -> KV | None:
        return run.get(segment)

    def encoded(self, segment: Segment, alone: KV, run: RunStore) -> None: ...

    def read(self, segment: Segment, held: KV, run: RunStore) -> None:
        known = run.get(segment)
        if known is None or (held.exact and not known.exact):
            run.put(segment, held)

    def wrote(self, segment: Segment, held: KV, run: RunStore) -> None:
        run.put(segment, held)


@dataclass(frozen=True)
class Isolated:
    """The text encoded alone. ``writer``: generated text starts from its writer's decode-time KV instead (KVCOMM).
    ``lead_tokens``: so many first tokens of the reader's prompt stand in front while encoding, as an attention sink."""

    writer: bool = False
    lead_tokens: int = 0
    encodes_alone: ClassVar[bool] = True
    absent: ClassVar[str] = "not encoded"

    @property
    def keeps(self) -> frozenset[Keep]:
        return frozenset({Keep.WRITTEN}) if self.writer else frozenset()

    def resolve(self, segment: Segment, run: RunStore) -> KV | None:
        return run.get(segment)

    def encoded(self, segment: Segment, alone: KV, run: RunStore) -> None:
        run.put(segment, alone)

    def read(self, segment: Segment, held: KV, run: RunStore) -> None: ...

    def wrote(self, segment: Segment, held: KV, run: RunStore) -> None:
        if self.writer:
            run.put(segment, held)


@dataclass(frozen=True)
class Nothing:
    """No KV is kept."""

    encodes_alone: ClassVar[bool] = False
    lead_tokens: ClassVar[int] = 0
    keeps: ClassVar[frozenset[Keep]] = frozenset()
    absent: ClassVar[str] = "dense method"

    def resolve(self, segment: Segment, run: RunStore) -> KV | None:
        return None

    def encoded(self, segment: Segment, alone: KV, run: RunStore) -> None: ...

    def read(self, segment: Segment, held: KV, run: RunStore) -> None: ...

    def wrote(self, segment: Segment, held: KV, run: RunStore) -> None: ...
