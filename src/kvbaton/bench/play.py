"""Teams at work on questions, several at once: agent by agent, because an agent needs the answers of those before it.

    planner      question 0, question 1, …   prefilled one by one, decoded together     ─▶ answers
    programmer   question 0, question 1, …   each with its own answers so far           ─▶ …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbaton.agents import Agent
from kvbaton.bench.script import Script
from kvbaton.bench.tasks.base import Question
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Generate
from kvbaton.engine.session import Call, Session
from kvbaton.errors import PromptTooLong
from kvbaton.prompt import Prompt
from kvbaton.references import RunStore


@dataclass
class Play:
    """One question's team at work. ``too_long``: why it ended before its last agent, else None."""

    question: Question
    run: RunStore
    hops: list[tuple[Prompt, HopResult]] = field(default_factory=list)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    too_long: PromptTooLong | None = None

    @property
    def text(self) -> str:
        """What the last agent that spoke wrote."""
        return self.hops[-1][1].text if self.hops else ""


def play(session: Session, script: Script, questions: Sequence[Question],
         decode: Callable[[Agent], Generate]) -> list[Play]:
    """Let the team answer every question. One whose prompt is too long for the context ends there, the others go on."""
    plays = [Play(question, session.start_run()) for question in questions]
    try:
        for agent in script.agents:
            _act(session, script, agent, [one for one in plays if one.too_long is None], decode(agent))
    finally:
        for one in plays:
            one.run.clear()
    return plays


def _act(session: Session, script: Script, agent: Agent, plays: Sequence[Play], decode: Generate) -> None:
    """One agent on every question."""
    acting, calls = [], []
    for one in plays:
        prompt = script.prompt(agent, one.question, one.outputs)
        try:
            session.check_length(prompt, decode)
        except PromptTooLong as problem:
            one.too_long = problem
            continue
        acting.append(one)
        calls.append(Call(prompt, decode, one.run, agent.name))
    for one, call, hop in zip(acting, calls, session.hop_together(calls), strict=True):
        one.hops.append((call.prompt, hop))
        one.outputs[agent.name] = hop.output_ids
