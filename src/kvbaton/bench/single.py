"""`kvbaton bench single`: one stream of teams on one engine; TTFT, TPOT, throughput and memory, methods interleaved.

    agent 1   [role 1][shared text][private 1]                      source hop
    agent 2   [role 2][shared text][private 2][glue][answer 1]      hands over: shared text, answer 1
    agent 3   [role 3][shared text][private 3][glue][answer 1][glue][answer 2]     … and so on, `rounds` times

Texts are random ids, so speed is all that can be read from it. Answers are generated to their full length. Everything a
hop does is inside its clock: gate, matching, correction, isolated encodes; write-back is inside the run's time. Gates
run and are then overruled, so that what is timed is reuse; how often they said no is counted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from kvbaton.bench.cast import teaching
from kvbaton.bench.ceiling import Machine, prefill_work, synchronise
from kvbaton.bench.measures import Handed, hop_record
from kvbaton.bench.memory_use import PeakMemory
from kvbaton.bench.result import Key, Record
from kvbaton.correctors.base import EdgeState
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Generate, Picker
from kvbaton.engine.session import Session
from kvbaton.errors import UsageError
from kvbaton.gates import Gate, Never, Verdict
from kvbaton.kv import KV
from kvbaton.prompt import Prompt, Segment
from kvbaton.recipes import Recipe


@dataclass(frozen=True)
class Point:
    """One place in the grid. All lengths in tokens; ``output``: tokens of every answer."""

    shared: int
    agents: int = 2
    rounds: int = 1
    role: int = 64
    private: int = 100
    glue: int = 8
    output: int = 16

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 1 or self.agents * self.rounds < 2:
            raise UsageError(f"every length must be 1 or more and some hop must follow another, got {self}")

    @property
    def name(self) -> str:
        """Shared length U, agents N, rounds R, as the papers call them."""
        return f"U={self.shared} N={self.agents} R={self.rounds}"


@dataclass(frozen=True)
class Overruled:
    """A gate whose no is not obeyed: it costs what it costs, and reuse is what gets timed."""

    inner: Gate

    def judge(self, state: EdgeState | None, source: KV, start: int) -> Verdict:
        verdict = self.inner.judge(state, source, start)
        return replace(verdict, accept=True, teach=False, reason=f"gate: {verdict.accept}")


@dataclass(frozen=True)
class FullLength:
    """Greedy without stop tokens, so that every answer has its full length."""

    barred: tuple[int, ...]

    def begin(self) -> Picker:
        return self

    def pick(self, logits: Tensor) -> int:
        if self.barred:
            logits = logits.clone()
            logits[list(self.barred)] = float("-inf")
        return int(logits.argmax())


class Stream:
    """Teams of one point, one method after another on the same texts."""

    def __init__(self, engine: HFEngine, point: Point, seed: int) -> None:
        self._engine, self._point, self._seed = engine, point, seed
        self._vocabulary = engine.model.get_input_embeddings().num_embeddings
        self._decode = Generate(point.output, FullLength(tuple(engine.eos_ids)))

    def _ids(self, count: int, *what: object) -> tuple[int, ...]:
        draw = random.Random(repr((self._seed, *what)))
        return tuple(draw.randrange(self._vocabulary) for _ in range(count))

    def _prompt(self, sample: int, agent: int, outputs: Sequence[tuple[str, tuple[int, ...]]]) -> Prompt:
        p = self._point
        segments = [Segment(self._ids(p.role, "role", agent)), Segment(self._ids(p.shared, "text", sample), "text"),
                    Segment(self._ids(p.private, "private", sample, agent))]
        for writer, ids in outputs:
            segments += [Segment(self._ids(p.glue, "glue", writer)), Segment(ids, writer)]
        return Prompt(f"agent{agent}", (*segments, Segment(self._ids(p.glue, "end", agent))))

    def run(self, session: Session, sample: int) -> list[tuple[HopResult, int]]:
        """One team, hop after hop, each with its count of handed-over segments.

        An agent reads the latest answer of every other agent that has spoken.
        """
        run, handed, hops = session.start_run(), Handed(), []
        latest: dict[int, tuple[int, ...]] = {}
        for agent in list(range(self._point.agents)) * self._point.rounds:
            name = f"agent{agent}"
            heard = [(f"agent{other}", ids) for other, ids in latest.items() if other != agent]
            prompt = self._prompt(sample, agent, heard)
            hop = session.hop(prompt, self._decode, run, writes=name)
            hops.append((hop, handed.count(prompt)))
            latest[agent] = hop.output_ids
            handed.wrote(name, hop.output_ids)
        run.clear()
        return hops


@dataclass(frozen=True)
class Speed:
    """What to measure: every method at every point, ``repeats`` teams each after ``learn`` dense ones."""

    points: tuple[Point, ...]
    methods: tuple[Recipe, ...]
    repeats: int
    learn: int
    seed: int

    @property
    def records(self) -> int:
        return len(self.points) * len(self.methods) * self.repeats


def prepare(engine: HFEngine, stream: Stream, recipe: Recipe, learn: int,
            open_sessions: ExitStack) -> tuple[Session, Record]:
    """A session that has learned from ``learn`` dense teams, with everything warm, and what learning cost."""
    session = open_sessions.enter_context(Session(engine, teaching(recipe)))
    teams = learn if recipe.corrector.learns else 1
    begin = time.perf_counter()
    hops = [hop for sample in range(teams) for hop, _ in stream.run(session, -1 - sample)]
    cost = {"teams": teams, "wall_s": time.perf_counter() - begin, "learn_s": sum(hop.learn_s for hop in hops),
            "prefill_s": sum(hop.ttft_s for hop in hops), "learned_bytes": session.memory.nbytes}
    session.follow(recipe if isinstance(recipe.gate, Never) else replace(recipe, gate=Overruled(recipe.gate)))
    stream.run(session, -1 - teams)
    return session, cost


def measure(engine: HFEngine, speed: Speed, machine: Machine, done: Container[Key] = ()) -> Iterator[Record]:
    """One record a (point, method, repeat) that is not ``done``; methods interleaved, their order turned by one."""
    names = [recipe.name for recipe in speed.methods]
    for point in speed.points:
        todo = [(repeat, name) for repeat in range(speed.repeats) for name in _turned(names, repeat)
                if (point.name, name, repeat) not in done]
        stream = Stream(engine, point, speed.seed)
        wanted = {name for _, name in todo}
        with ExitStack() as open_sessions:
            casts = {r.name: prepare(engine, stream, r, speed.learn, open_sessions)
                     for r in speed.methods if r.name in wanted}
            for repeat, name in todo:
                session, cost = casts[name]
                yield {"question": point.name, "method": name, "repeat": repeat, "point": asdict(point), "learn": cost,
                       **_timed(engine, stream, session, repeat, machine)}


def _turned(names: list[str], by: int) -> list[str]:
    shift = by % len(names)
    return names[shift:] + names[:shift]


def _timed(engine: HFEngine, stream: Stream, session: Session, sample: int, machine: Machine) -> Record:
    with PeakMemory(engine.device) as peak:
        synchronise(engine.device)
        begin = time.perf_counter()
        hops = stream.run(session, sample)
        synchronise(engine.device)
        wall_s = time.perf_counter() - begin
    made = sum(len(hop.output_ids) for hop, _ in hops)
    return {"wall_s": wall_s, "output_tokens_per_s": made / wall_s, "peak_process_bytes": peak.process_bytes,
            "peak_torch_bytes": peak.torch_bytes, "hops": [_hop(engine, hop, handed, machine) for hop, handed in hops]}


def _hop(engine: HFEngine, hop: HopResult, handed: int, machine: Machine) -> dict[str, Any]:
    computed = hop.entries.recomputed / hop.layers
    work = prefill_work(engine, hop.prompt_tokens, computed, hop.moved_bytes)
    said_no = sum("gate: False" in d.reason for d in hop.decisions)
    return {**hop_record(hop, handed), "gate_said_no": said_no,
            "ceiling_s": work.ceiling_s(machine), "mbu": work.bandwidth_utilisation(machine, hop.ttft_s),
            "mfu": work.flop_utilisation(machine, hop.ttft_s)}
