"""Team: agents, a model and a method. Templates become prompts, prompts become hops.

    inputs ── tokenised once ──┐
                               ▼
    round 1   solver ─ ids ─▶ critic ─ ids ─▶ judge      an agent's output goes on as the very ids it sampled
    round 2   solver' ...                                {solver@-1} is what solver wrote in round 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvbaton.agents import Agent, Graph
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Force, Generate, Greedy, Sampler
from kvbaton.engine.session import Session
from kvbaton.engine.text import TextCodec
from kvbaton.errors import TeamError, UnknownName, Unsupported, UsageError
from kvbaton.recipes import Recipe, recipe
from kvbaton.references import RunStore
from kvbaton.teamrun import TeamRun, Turn
from kvbaton.templates import PREVIOUS

if TYPE_CHECKING:
    from kvbaton.vllm.client import RemoteEngine, RemoteSession

__all__ = ["Agent", "Graph", "Team", "TeamRun", "Turn", "replay"]

OnText = Callable[[str, str], None]
"""Called with the agent's name and the next piece of its answer."""


class Team:
    """Agents over one session. What the method learns stays with the session, from run to run.

    ``engine`` and ``method`` (a recipe's name or a Recipe; default "hybrid") make a session of the team's own;
    ``session`` is one that the caller keeps, to share what was learned. ``inputs``: the names a run must be given
    (None: every placeholder that names no agent). ``max_new_tokens``: for agents that set no limit of their own.
    Raises TeamError where the agents do not fit together.
    """

    def __init__(self, agents: Sequence[Agent], *, engine: HFEngine | RemoteEngine | None = None,
                 method: str | Recipe | None = None,
                 session: Session | None = None, inputs: Sequence[str] | None = None, rounds: int = 1,
                 max_new_tokens: int = 128, sampler: Sampler | None = None) -> None:
        self.graph = Graph.of(agents, inputs, rounds)
        self._owned = session is None
        self.session: Session | RemoteSession = _session(engine, method) if session is None else session
        if session is not None and (engine is not None or method is not None):
            raise UsageError("a session brings its own engine and method: give either session=, or engine= and method=")
        self.text = _codec(self.session)
        how = Greedy() if sampler is None else sampler
        self._decode = {agent.name: Generate(agent.max_new_tokens or max_new_tokens, how, self._stop_ids(agent))
                        for agent in self.graph.agents}

    def run(self, inputs: Mapping[str, str] | None = None, /, *, on_token: OnText | None = None,
            **more: str) -> TeamRun:
        """Let every agent answer, round by round.

        Inputs come as keywords or as a mapping. Shared KV lives for this call only: it is freed however the run ends,
        Ctrl-C included, and the team can run again. Raises TeamError for inputs that are missing, unknown or empty,
        PromptTooLong where a prompt and its answer exceed the model's context.
        """
        texts = {**(inputs or {}), **more}
        fills = self._encode(texts)
        store = self.session.start_run()
        turns: list[Turn] = []
        try:
            for number, agents in enumerate(self.graph.schedule, 1):
                fills |= {name + PREVIOUS: fills.pop(name, ()) for name in self.graph.names}
                for agent in agents:
                    turns.append(self._turn(agent, number, fills, store, on_token))
                    fills[agent.name] = turns[-1].hop.output_ids
        finally:
            store.clear()
        return TeamRun(self.session.engine.identity.name, self.session.recipe.name, texts, tuple(turns))

    def close(self) -> None:
        """Finish learning. A session that came from the caller stays open."""
        if self._owned:
            self.session.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _turn(self, agent: Agent, number: int, fills: Mapping[str, tuple[int, ...]], store: RunStore,
              on_text: OnText | None) -> Turn:
        prompt = self.text.prompt(agent.name, *agent.templates, fills)
        stream = self.text.stream()

        def show(text: str) -> None:
            if on_text is not None and text:
                on_text(agent.name, text)

        hop = self.session.hop(prompt, self._decode[agent.name], store, writes=agent.name,
                               on_token=None if on_text is None else lambda token: show(stream.feed(token)))
        show(stream.end())
        return Turn(agent.name, number, prompt, hop)

    def _encode(self, texts: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """Token ids of every input, once a run."""
        wanted = self.graph.inputs
        missing = [name for name in wanted if name not in texts]
        if missing:
            near = UnknownName("name", missing[0], (*self.graph.names, *texts)).nearest
            raise TeamError(f"the input {missing[0]!r} is missing: "
                            f"{f'is {near!r} meant? ' if near else ''}this team needs {', '.join(wanted)}")
        for name, text in texts.items():
            if name in self.graph.names:
                raise TeamError(f"{name!r} is an agent, not an input: it writes its own text")
            if name not in wanted:
                raise TeamError(str(UnknownName("input", name, wanted)))
            if not isinstance(text, str):
                raise TeamError(f"the input {name!r} must be text, not {type(text).__name__}")
            if not text.strip():
                raise TeamError(f"the input {name!r} is empty")
        ids = {name: self.text.encode(text) for name, text in texts.items()}
        if unknown := [name for name in ids if not ids[name]]:
            raise TeamError(f"the input {unknown[0]!r} has no character that this model knows")
        return ids

    def _stop_ids(self, agent: Agent) -> frozenset[int]:
        return frozenset(self._stop_id(agent, text) for text in agent.stop)

    def _stop_id(self, agent: Agent, text: str) -> int:
        token = self.text.token_id(text)
        if token is None:
            raise TeamError(f"agent {agent.name!r}: the stop text {text!r} is no single token of this model")
        return token


def replay(turns: Iterable[Turn], session: Session) -> tuple[HopResult, ...]:
    """Walk a run's prompts through another session, with its answers forced: what that method makes of the same texts.

    Each result holds the answer's logits ``[m, vocab]``; a turn that said nothing has none and its method's first
    token is thrown away.
    """
    said = ((turn.prompt, turn.hop.output_ids, turn.agent) for turn in turns)
    return tuple(session.play((prompt, Force(ids), agent) if ids else (prompt, Generate(1), None)
                              for prompt, ids, agent in said))


def _session(engine: HFEngine | RemoteEngine | None, method: str | Recipe | None) -> Session | RemoteSession:
    if engine is None:
        raise UsageError("a team needs a model: give engine=load(...) or session=")
    chosen = method if isinstance(method, Recipe) else recipe(method or "hybrid")
    return Session(engine, chosen) if isinstance(engine, HFEngine) else engine.open_session(chosen)


def _codec(session: Session | RemoteSession) -> TextCodec:
    if session.engine.text is None:
        raise Unsupported("this engine has no tokenizer: make it with HFEngine(model, tokenizer)")
    return session.engine.text
