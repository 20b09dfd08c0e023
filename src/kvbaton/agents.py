"""Agent, and Graph: who reads whom, in which order, in which rounds. Read off the templates; no model is needed.

    {question}            an input: given to every run
    {solver}              what agent "solver" wrote in this round: solver runs before the reader
    {solver@-1}           what it wrote in the round before; nothing in the first round
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvbaton.errors import TeamError, UnknownName
from kvbaton.templates import NAME, Field, Template


@dataclass(frozen=True)
class Agent:
    """One role. ``prompt`` (the user message) and ``system`` are templates; see the module's head.

    ``system``: None leaves the system message to the model's chat template. ``max_new_tokens``: None takes the team's.
    ``stop``: texts that end an answer beside the model's own end of turn; each must be a single token of the model.
    Raises TeamError for a bad name, an empty prompt or a template that cannot be read.
    """

    name: str
    prompt: str
    system: str | None = None
    max_new_tokens: int | None = None
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise TeamError(f"{self.name!r} is no name for an agent: use letters, digits, '_' and '-', "
                            "and no digit first")
        if not self.prompt.strip():
            raise TeamError(f"agent {self.name!r} has an empty prompt")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise TeamError(f"agent {self.name!r}: max_new_tokens must be 1 or more, got {self.max_new_tokens}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise TeamError(f"agent {self.name!r}: stop must be a list of texts, none of them empty")
        _ = self.templates

    @cached_property
    def templates(self) -> tuple[Template | None, Template]:
        """System and user template."""
        return (None if self.system is None else self._parse("system", self.system)), self._parse("prompt", self.prompt)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """Every placeholder, the system message's first."""
        system, user = self.templates
        return (*(system.fields if system else ()), *user.fields)

    def located(self) -> Iterator[tuple[str, Field]]:
        """Every placeholder with the words for where it stands."""
        for part, template in zip(("system", "prompt"), self.templates, strict=True):
            if template is not None:
                for field in template.fields:
                    yield f"agent {self.name!r}, {part}, {template.where(field)}", field

    def _parse(self, part: str, text: str) -> Template:
        try:
            return Template.parse(text)
        except TeamError as error:
            raise TeamError(f"agent {self.name!r}, {part}, {error}") from None


@dataclass(frozen=True)
class Graph:
    """Agents that fit together. Raises TeamError where they do not; the message says who and where.

    ``inputs``: names a run must be given. ``rounds``: how often the team goes round.
    """

    agents: tuple[Agent, ...]
    inputs: tuple[str, ...]
    rounds: int = 1

    @classmethod
    def of(cls, agents: Sequence[Agent], inputs: Sequence[str] | None = None, rounds: int = 1) -> Graph:
        """``inputs`` None: every placeholder that names no agent is an input."""
        names = {agent.name for agent in agents}
        if inputs is None:
            inputs = list(dict.fromkeys(field.name for agent in agents for field in agent.fields
                                        if field.name not in names and not field.previous))
        return cls(tuple(agents), tuple(inputs), rounds)

    def __post_init__(self) -> None:
        if not self.agents:
            raise TeamError("a team needs at least one agent")
        if twice := _repeated(self.names):
            raise TeamError(f"two agents are called {twice!r}: give each its own name")
        if twice := _repeated(self.inputs):
            raise TeamError(f"the input {twice!r} is declared twice")
        if both := [name for name in self.inputs if name in self.names]:
            raise TeamError(f"{both[0]!r} is an input and an agent: rename one of them")
        self._check_placeholders()
        _ = self.schedule

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(agent.name for agent in self.agents)

    @cached_property
    def order(self) -> tuple[Agent, ...]:
        """Writers before readers; agents that do not wait for each other in the order they are listed.

        Ties change no answer of a dense hop, nor of one that starts from texts encoded alone or by their writers. They
        do where a text's first reader (`Origin`) or last reader (`Chained`) is the one that KV is taken from.
        """
        waiting, order = list(self.agents), list[Agent]()
        while waiting:
            unwritten = {agent.name for agent in waiting}
            ready = next((agent for agent in waiting if unwritten.isdisjoint(self.writers(agent))), None)
            if ready is None:
                raise TeamError(f"agents wait for each other: {' -> '.join(self._cycle(waiting))} (writer -> reader); "
                                "let one of them read the round before, as in {name@-1}")
            waiting.remove(ready)
            order.append(ready)
        return tuple(order)

    @cached_property
    def schedule(self) -> tuple[tuple[Agent, ...], ...]:
        """Who runs in each round, in order. All run in the last one; before, those whose words are read later."""
        if self.rounds < 1:
            raise TeamError(f"rounds must be 1 or more, got {self.rounds}")
        out = [self.order]
        while len(out) < self.rounds:
            wanted = {field.name for agent in out[0] for field in agent.fields if field.previous}
            for agent in reversed(self.order):
                wanted |= set(self.writers(agent)) if agent.name in wanted else set()
            if not wanted:
                raise TeamError(f"rounds={self.rounds}, but nothing said more than {len(out)} "
                                f"{'rounds' if len(out) > 1 else 'round'} before the end is read: "
                                "lower rounds, or read the round before with {name@-1}")
            out.insert(0, tuple(agent for agent in self.order if agent.name in wanted))
        return tuple(out)

    def writers(self, reader: Agent) -> list[str]:
        """Agents whose output of this round the reader reads."""
        return [field.name for field in reader.fields if field.name in self.names and not field.previous]

    def _check_placeholders(self) -> None:
        read = set()
        for agent in self.agents:
            for where, field in agent.located():
                if field.previous and field.name in self.inputs:
                    raise TeamError(f"{where}: {field} reads an input of the round before, but inputs stay the same: "
                                    f"write {{{field.name}}}")
                if field.name not in (*self.names, *self.inputs):
                    raise TeamError(f"{where}: {UnknownName('placeholder', field.name, self.names + self.inputs)}")
                read.add(field.name)
        if unread := [name for name in self.inputs if name not in read]:
            raise TeamError(f"the input {unread[0]!r} is declared, but no agent reads {{{unread[0]}}}")

    def _cycle(self, waiting: Sequence[Agent]) -> list[str]:
        """Names along one cycle, writer before reader, first and last the same."""
        agents = {agent.name: agent for agent in waiting}
        path = [waiting[0].name]
        while path[-1] not in path[:-1]:
            path.append(next(name for name in self.writers(agents[path[-1]]) if name in agents))
        return path[path.index(path[-1]):][::-1]


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for i, name in enumerate(names) if name in names[:i]), None)
