"""A task's team as prompts: who runs when, and the exact ids that each agent reads.

Shared text goes from agent to agent as token ids. An input that only one agent reads is its own text, not shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvbaton.agents import Agent, Graph
from kvbaton.bench.chain import Turn
from kvbaton.bench.tasks.base import Question
from kvbaton.engine.text import TextCodec
from kvbaton.prompt import Prompt, Segment

Outputs = Mapping[str, tuple[int, ...]]
"""Token ids of what each agent wrote, by its name."""


class Script:
    """The agents of a task in running order, on one tokenizer. ``stop``: ids that end an answer of nothing."""

    def __init__(self, codec: TextCodec, agents: Sequence[Agent], stop: frozenset[int]) -> None:
        graph = Graph.of(agents)
        self.agents = graph.order
        self._codec, self._end = codec, (min(stop, default=0),)
        readers = Counter(name for agent in agents for name in {field.name for field in agent.fields})
        self._private = frozenset(name for name in graph.inputs if readers[name] == 1)

    def prompt(self, agent: Agent, question: Question, outputs: Outputs) -> Prompt:
        """What ``agent`` reads. Raises TeamError where an output is missing, Unsupported without a chat template."""
        fills = {name: self._codec.encode(text) for name, text in question.inputs.items()} | dict(outputs)
        system, user = agent.templates
        return own(self._codec.prompt(agent.name, system, user, fills), self._private)

    def turns(self, question: Question, outputs: Outputs) -> list[Turn]:
        """The team's hops with their answers given; an empty answer is forced as the stop token and read by nobody."""
        return [Turn(self.prompt(agent, question, outputs), outputs[agent.name] or self._end,
                     agent.name if outputs[agent.name] else None) for agent in self.agents]

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._codec.encode(text))


def own(prompt: Prompt, shares: frozenset[str]) -> Prompt:
    """``prompt`` with the segments of ``shares`` made the agent's own, joined to the own text beside them."""
    segments: list[Segment] = []
    for segment in prompt.segments:
        mine = segment.share is None or segment.share in shares
        if mine and segments and segments[-1].share is None:
            segments[-1] = Segment(segments[-1].token_ids + segment.token_ids)
        else:
            segments.append(Segment(segment.token_ids) if mine else segment)
    return replace(prompt, segments=tuple(segments))
