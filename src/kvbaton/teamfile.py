"""A team as a YAML file: checked key by key, every mistake with its line.

    method: hybrid                    inputs:
    rounds: 1                           question: a default, or nothing if it must be given
    max_new_tokens: 128               agents:
    sampling: {temperature: 0.7}        - {name: solver, system: ..., prompt: "{question}"}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvbaton.agents import Agent, Graph
from kvbaton.errors import TeamError, UnknownName

if TYPE_CHECKING:
    from kvbaton.engine.hf import HFEngine
    from kvbaton.engine.session import Session
    from kvbaton.recipes import Recipe
    from kvbaton.team import Team


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AgentSpec(_Strict):
    """One agent of the file."""

    name: str = Field(description="Letters, digits, '_' and '-'; other agents read its output as {name}.")
    prompt: str = Field(description="User message; {question} is an input, {solver} another agent's output, "
                                    "{solver@-1} that of the round before. Double any other brace.")
    system: str | None = Field(None, description="System message, a template too; left out: the model's own default.")
    max_new_tokens: int | None = Field(None, ge=1, description="Longest answer in tokens; left out: the team's.")
    stop: list[str] = Field([], description="Texts that end the answer; each must be one token of the model.")

    def agent(self) -> Agent:
        return Agent(self.name, self.prompt, self.system, self.max_new_tokens, tuple(self.stop))


class SamplingSpec(_Strict):
    """Seeded sampling; without it, agents answer greedily."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0


class TeamSpec(_Strict):
    """A team file."""

    agents: list[AgentSpec] = Field(description="The agents; their order settles ties only.")
    inputs: dict[str, str | None] | None = Field(
        None, description="What a run is given, with a default or null. Left out: every placeholder that names no "
                          "agent; declared, a misspelt placeholder is found before the run.")
    rounds: int = Field(1, ge=1, description="How often the team goes round.")
    max_new_tokens: int = Field(128, ge=1, description="Longest answer in tokens.")
    method: str = Field("hybrid", description="A name from `kvbaton methods`.")
    model: str = Field("smollm2", description="A name from `kvbaton models`, a local folder or a Hugging Face id.")
    sampling: SamplingSpec | None = None

    @property
    def graph(self) -> Graph:
        """The agents, checked against each other. Raises TeamError."""
        return Graph.of(self.members(), None if self.inputs is None else tuple(self.inputs), self.rounds)

    def members(self) -> tuple[Agent, ...]:
        return tuple(spec.agent() for spec in self.agents)

    def fill(self, given: Mapping[str, str]) -> dict[str, str]:
        """The given inputs over the file's defaults; `Team.run` says what is still missing."""
        defaults = {name: text for name, text in (self.inputs or {}).items() if text is not None}
        return {**defaults, **given}

    def build(self, *, engine: HFEngine | None = None, method: str | Recipe | None = None,
              session: Session | None = None) -> Team:
        """A team on a model; ``method`` None takes the file's. Or on a caller's ``session``, with its own method."""
        from kvbaton.engine.sampling import Sampled
        from kvbaton.team import Team

        return Team(self.members(), engine=engine, method=method if session or method else self.method,
                    session=session, inputs=self.graph.inputs, rounds=self.rounds, max_new_tokens=self.max_new_tokens,
                    sampler=Sampled(**self.sampling.model_dump()) if self.sampling else None)


def load_team(path: str | Path) -> TeamSpec:
    """Read and check a team file, graph included. Raises TeamError; the message names file, line and key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TeamError(f"cannot read the team file {str(path)!r}: {error}") from error
    return parse_team(text, str(path))


def parse_team(text: str, name: str = "team file") -> TeamSpec:
    """As `load_team`, from text; ``name`` stands in the messages."""
    node, data = _parse(text, name)
    if repeated := list(_repeated_keys(node)):
        raise TeamError("\n".join(f"{name}, line {line}: the key {key!r} stands there twice" for line, key in repeated))
    try:
        spec = TeamSpec.model_validate(data)
    except ValidationError as error:
        raise TeamError("\n".join(_explain(problem, node, name) for problem in error.errors())) from None
    try:
        _ = spec.graph
    except TeamError as error:
        raise TeamError(f"{name}: {error}") from None
    return spec


def team_schema() -> dict[str, Any]:
    """JSON schema of a team file, for editors; docs/team.schema.json holds it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **TeamSpec.model_json_schema()}


def _parse(text: str, name: str) -> tuple[yaml.Node, Any]:
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise TeamError(f"{name}: a team file is a mapping with the key 'agents'")
        return node, loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise TeamError(f"{name}{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise TeamError(f"{name}: not YAML: {error}") from error


def _repeated_keys(root: yaml.Node) -> Iterator[tuple[int, str]]:
    """Line and name of every key that stands twice in one mapping: YAML itself would drop the first."""
    nodes, visited = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in visited or not isinstance(node, yaml.CollectionNode):  # an alias may lead back
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
            continue
        keys = [key.value for key, _ in node.value]
        yield from ((key.start_mark.line + 1, key.value) for i, (key, _) in enumerate(node.value)
                    if key.value in keys[:i])
        nodes += [value for _, value in node.value]


def _explain(problem: Any, node: yaml.Node, name: str) -> str:
    """One line on what pydantic found: file, line, path and what to do."""
    path: tuple[int | str, ...] = problem["loc"]
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    place = f"{name}, line {_line(node, path)}, {where}"
    if problem["type"] == "extra_forbidden":
        return f"{place}: {UnknownName('key', str(path[-1]), _known_keys(path))}"
    return f"{place}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _known_keys(path: Sequence[int | str]) -> Sequence[str]:
    parents: dict[str, type[_Strict]] = {"agents": AgentSpec, "sampling": SamplingSpec}
    level = parents[str(path[0])] if len(path) > 1 else TeamSpec
    return tuple(level.model_fields)


def _line(node: yaml.Node, path: Sequence[int | str]) -> int:
    """Line of the deepest part of ``path`` that stands in the file, counted from 1."""
    mark = node.start_mark
    for step in path:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(step)), None)
            if found is None:
                break
            mark, node = found[0].start_mark, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step]
            mark = node.start_mark
    return int(mark.line) + 1
