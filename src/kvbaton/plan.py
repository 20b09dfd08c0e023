"""What happens to each segment of a prompt, and why: decided before anything is computed.

The rule of fallback: a refused segment is recomputed by itself, over whatever stands before it. The whole hop goes
dense when a refusal says that a dense hop would teach something needed (and its source is exact, so that it can), or
when the recipe asks for it (`Recipe.hop_fallback`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from kvbaton.correctors.base import EdgeState
from kvbaton.correctors.record import Recorded
from kvbaton.gates import Verdict
from kvbaton.kv import KV
from kvbaton.memory import Memory
from kvbaton.prompt import Edge, Prompt, Segment, Span
from kvbaton.recipes import PrivateText, Recipe
from kvbaton.references import RunStore


class Action(Enum):
    """What is done with a segment's KV."""

    RECOMPUTE = "recompute"
    REUSE = "reuse"
    CORRECT = "correct"


@dataclass(frozen=True)
class Step:
    """The decision on one segment that could be reused.

    ``edge`` is None for a first hop and for stale private text. ``source`` stays set on a recompute, so that a dense
    hop can learn from it.
    """

    index: int
    segment: Segment
    span: Span
    action: Action
    reason: str
    edge: Edge | None = None
    source: KV | None = None
    state: EdgeState | None = None
    predicted: float | None = None


@dataclass(frozen=True)
class Plan:
    """One step a reusable segment, in prompt order."""

    steps: tuple[Step, ...]

    @property
    def reused(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.action is not Action.RECOMPUTE)

    @property
    def corrected_tokens(self) -> int:
        """Tokens of all segments that are corrected."""
        return sum(len(step.span) for step in self.steps if step.action is Action.CORRECT)

    @property
    def dense(self) -> bool:
        """Nothing is reused: every KV of this hop comes out exact."""
        return not self.reused

    @property
    def exact_until(self) -> int:
        """Position of the first reused row: what stands before it comes out exact."""
        return min((step.span.start for step in self.reused), default=2**62)


def make_plan(prompt: Prompt, recipe: Recipe, run: RunStore, memory: Memory, own: RunStore,
              truth: Mapping[int, KV] | None = None) -> Plan:
    """Decide every segment of ``prompt``.

    ``run`` holds the run's shared KV; ``own`` the reader's private KV by `own_text`, from its last dense hop
    (PrivateText.STALE) or alone (PrivateText.ANCHORED); ``truth`` the true KV by segment index, for correctors that
    need it. Reads only; learns and stores nothing.
    """
    judged = [_judge(prompt, recipe, run, memory, index, slot, truth or {}) for index, _, _, slot in prompt.shared()]
    fallback = next((step for step, verdict in judged
                     if not verdict.accept and (verdict.teach or recipe.hop_fallback)), None)
    if fallback is not None:
        cause = f"hop dense: {fallback.segment.share} {fallback.reason}"
        steps = [step if not verdict.accept else replace(step, action=Action.RECOMPUTE, reason=cause)
                 for step, verdict in judged]
    else:
        steps = [step for step, _ in judged]
    if recipe.private is PrivateText.STALE and any(step.action is not Action.RECOMPUTE for step in steps):
        steps += _stale_private(prompt, own)
    if recipe.private is PrivateText.ANCHORED:
        steps += _anchored_private(prompt, recipe, memory, own, steps)
    return Plan(tuple(sorted(steps, key=lambda step: step.index)))


def _judge(prompt: Prompt, recipe: Recipe, run: RunStore, memory: Memory, index: int, slot: int,
           truth: Mapping[int, KV]) -> tuple[Step, Verdict]:
    segment, span = prompt.segments[index], prompt.spans[index]
    source = recipe.reference.resolve(segment, run)
    if source is None:
        absent = recipe.reference.absent
        return Step(index, segment, span, Action.RECOMPUTE, absent), Verdict(False, absent)
    edge = Edge(segment.share or "", source.source, prompt.role, slot)
    corrector = recipe.corrector
    state = corrector.reveal(truth[index], source) if corrector.needs_truth else memory.state(edge)
    if corrector.learns and (state is None or state.texts == 0):
        verdict = Verdict(False, "nothing learned", teach=True)
    else:
        verdict = recipe.gate.judge(state, source, span.start)
    if verdict.teach and corrector.learns and not (source.exact or recipe.learn_approximate):
        verdict = replace(verdict, teach=False, reason=f"{verdict.reason}, source approximate")
    if not verdict.accept:
        action = Action.RECOMPUTE
    elif corrector.can_correct(state, source):
        action = Action.CORRECT
    else:
        action = Action.REUSE
    return Step(index, segment, span, action, verdict.reason, edge, source, state, verdict.predicted), verdict


def _stale_private(prompt: Prompt, own: RunStore) -> list[Step]:
    """Reuse of the agent's own text behind shared text, as it was in its last dense hop."""
    steps = []
    for index, segment, span in prompt.own_behind():
        held = own.get(own_text(segment, index))
        if held is not None:
            steps.append(Step(index, segment, span, Action.REUSE, "stale private text", source=held))
    return steps


def _anchored_private(prompt: Prompt, recipe: Recipe, memory: Memory, own: RunStore, shared: list[Step]) -> list[Step]:
    """The agent's own text right behind each shared text: corrected like it, or learned from where that is recomputed.

    What was learned belongs to the very ids of the own text, so text that changes from run to run is computed.
    """
    steps = []
    for front in shared:
        index = front.index + 1
        behind = prompt.segments[index] if index < len(prompt.segments) else None
        if behind is None or behind.share is not None or front.source is None or front.edge is None:
            continue
        alone = own.get(own_text(behind, index))
        if alone is None:
            continue
        source = replace(alone, before=front.source)
        edge = Edge(f"behind {front.edge.share} {behind.key[:8]}", prompt.role, prompt.role, front.edge.slot)
        state = memory.state(edge)
        if front.action is Action.RECOMPUTE:
            steps.append(Step(index, behind, prompt.spans[index], front.action, front.reason, edge, source, state))
        elif recipe.corrector.can_correct(state, source):
            steps.append(Step(index, behind, prompt.spans[index], Action.CORRECT, "own text", edge, source, state))
    return steps


def note_reuse(plan: Plan) -> None:
    """Tell the record of every edge that a hop reuses so: what a gate asks later. Once a hop."""
    for step in plan.reused:
        if isinstance(step.state, Recorded) and step.source is not None:
            step.state.record.reused_once(step.state.novelty(step.source))


def own_text(segment: Segment, index: int) -> Segment:
    """The key of an agent's own text in a store: equal texts at two places of a prompt are two."""
    return replace(segment, share=f"own text {index}")
