"""What is measured on one question, and how a hop is put on record: common to `fidelity` and `accuracy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvbaton.bench.chain import Turn
from kvbaton.bench.result import Record
from kvbaton.bench.script import Script
from kvbaton.bench.tasks.base import Question, Task
from kvbaton.engine.result import HopResult
from kvbaton.engine.session import Session
from kvbaton.errors import UsageError
from kvbaton.prompt import Prompt


class Handed:
    """Counts the shared segments of a prompt that an earlier agent of the run read or wrote, whatever the method.

    A hop without any is a source hop.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str | None, tuple[int, ...]]] = set()

    def count(self, prompt: Prompt) -> int:
        """Segments of ``prompt`` seen before; all of them count as seen from now on."""
        shared = [(segment.owner, segment.token_ids) for _, segment, _, _ in prompt.shared()]
        known = sum(one in self._seen for one in shared)
        self._seen.update(shared)
        return known

    def wrote(self, writer: str, ids: tuple[int, ...]) -> None:
        self._seen.add((writer, ids))


def short(value: float) -> float:
    """Six significant digits: what a measurement carries, at half the bytes."""
    return float(f"{value:.6g}")


def hop_record(hop: HopResult, handed: int) -> Record:
    """A hop as plain JSON values, without its text. ``handed``: see `Handed`."""
    e = hop.entries
    said = [f"{d.action}: {d.reason}" for d in hop.decisions]
    return {
        "agent": hop.reader, "prompt_tokens": hop.prompt_tokens, "shared_tokens": hop.shared_tokens,
        "layers": hop.layers, "handed": handed, "dense": hop.dense,
        "output_tokens": len(hop.output_ids), "ttft_s": short(hop.ttft_s),
        "tpot_s": None if hop.tpot_s is None else short(hop.tpot_s), "plan_s": short(hop.plan_s),
        "learn_s": short(hop.learn_s), "reuse": short(hop.effective_reuse_ratio),
        "entries": {"reused": e.reused, "corrected": e.corrected, "recomputed": e.recomputed, "cached": e.cached},
        "extra_entries": hop.extra_entries, "moved_bytes": hop.moved_bytes, "held_bytes": hop.held_bytes,
        "boundary_bytes": hop.boundary_bytes, "rows_per_layer": list(hop.rows_per_layer),
        "learned_bytes": hop.learned_bytes, "reasons": {reason: said.count(reason) for reason in said},
    }


@dataclass(frozen=True)
class Scene:
    """The question in hand. ``turns``: the team's hops with its dense answers; empty where a measure needs none."""

    task: Task
    script: Script
    question: Question
    turns: Sequence[Turn]


class Measure(Protocol):
    """One kind of measurement. `open` is called once a question, before any method.

    ``batch``: questions that are measured together; ``decoded_together``: questions whose dense answers are.
    """

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What belongs to the identity of the results."""
        ...

    @property
    def needs_answers(self) -> bool:
        """Whether `Scene.turns` must be there."""
        ...

    @property
    def batch(self) -> int: ...

    @property
    def decoded_together(self) -> int: ...

    def open(self, scene: Scene, reference: Session) -> None: ...

    def measure(self, scenes: Sequence[Scene], session: Session, repeat: int) -> list[Record]:
        """A method on a batch of questions; one record each."""
        ...


def check_batch(size: int) -> None:
    if size < 1:
        raise UsageError(f"a batch holds 1 question or more, got {size}")
