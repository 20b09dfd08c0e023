"""Divergence of reuse, method by method, after m learned texts: `python docs/results/affine/study.py --help`.

For every text and reader the dense answer is generated once; each method is then forced to that answer and its logits
compared with the dense ones. All methods start from the same source KV. Nothing is learned from the texts that are
scored. Rows are appended to a JSONL file; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import arguments
import torch
from methods import fed_by_pairs, methods
from tasks import TASKS, Ids, Task

from kvbaton.bench.cast import TaughtMemory, branch, teaching
from kvbaton.bench.chain import agreement, divergence
from kvbaton.bench.conditions import conditions
from kvbaton.bench.result import Journal
from kvbaton.correctors.base import EdgeState
from kvbaton.correctors.none import NoCorrection, NoState
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.models import load
from kvbaton.engine.sampling import Force, Generate
from kvbaton.engine.session import Session
from kvbaton.gates import Never
from kvbaton.kv import KV, Geometry
from kvbaton.memory import Memory
from kvbaton.prompt import Edge, Prompt
from kvbaton.recipes import Recipe
from kvbaton.references import Origin, RunStore
from kvbaton.selectors.base import AllRows


@dataclass
class Pairs(NoState):
    """The pairs that a dense hop offers to learn from, kept as they are."""

    pairs: list[tuple[KV, KV]] = field(default_factory=list)


@dataclass(frozen=True)
class Tap(NoCorrection):
    """It only writes down what it could learn."""

    learns: ClassVar[bool] = True

    def new_state(self, geometry: Geometry) -> EdgeState:
        return Pairs()

    def learn(self, state: Any, source: KV, target: KV) -> None:
        state.pairs.append((source, target))


class Dense:
    """Dense hops of a task: source KV, pairs to learn from, answers and their logits."""

    def __init__(self, engine: HFEngine, task: Task, folder: Path, written_tokens: int) -> None:
        self.engine, self.task, self.texts = engine, task, task.texts(folder)
        self._written = written_tokens
        self._session = Session(engine, Recipe("tap", "", "", Origin(), Tap(), AllRows(), Never()))

    def source(self, text: int) -> tuple[RunStore, dict[str, Ids]]:
        """The source's hop: a run that holds the shared text, and what the readers' templates are filled with."""
        assert self.engine.text is not None
        fills = self.task.fills(self.engine.text, self.texts[text])
        run = self._session.start_run()
        prompt = self.task.prompt(self.engine.text, self.task.source, fills)
        decode = Generate(self._written if self.task.written else 1)
        hop = self._session.hop(prompt, decode, run, writes=self.task.share if self.task.written else None)
        return run, fills | ({self.task.share: hop.output_ids} if self.task.written else {})

    def replay(self, session: Session, fills: Mapping[str, Ids]) -> RunStore:
        """The source's hop in ``session``, for methods that want more of it than its keys and values."""
        run = session.start_run()
        decode = Force(fills[self.task.share] if self.task.written else (0,))
        session.hop(self.prompt(self.task.source, fills), decode, run,
                    writes=self.task.share if self.task.written else None)
        return run

    def prompt(self, reader: str, fills: Mapping[str, Ids]) -> Prompt:
        assert self.engine.text is not None
        return self.task.prompt(self.engine.text, reader, fills)

    def hop(self, prompt: Prompt, decode: Generate | Force, run: RunStore) -> Any:
        return self._session.hop(prompt, decode, branch(run, prompt))

    def take_pairs(self) -> list[tuple[Edge, KV, KV]]:
        """Pairs seen since the last call."""
        memory, out = self._session.memory, []
        for edge in memory.edges():
            out += [(edge, *pair) for pair in memory.state(edge).pairs]  # type: ignore[union-attr]
            memory.forget(edge)
        return out


class Pupil:
    """One corrector over one kind of source, with its memory after each number of texts learned."""

    def __init__(self, engine: HFEngine, method: Recipe) -> None:
        self.method, self._engine = method, engine
        self.memory = Memory(method.corrector, engine.geometry)
        self._teacher = None if fed_by_pairs(method) else Session(engine, teaching(method), memory=self.memory)

    def learn(self, pairs: Sequence[tuple[Edge, KV, KV]], prompts: Sequence[Prompt]) -> None:
        if self._teacher is None:
            for edge, source, target in pairs:
                self.memory.learn(edge, source, target)
        else:
            for prompt in prompts:
                self._teacher.hop(prompt, Force((0,)), self._teacher.start_run())


Known = dict[tuple[Any, int], TaughtMemory]
"""What each family of methods knows after a number of texts."""


def lesson_file(folder: Path, key: Any, mark: int) -> Path:
    return folder / f"{hashlib.blake2b(repr(key).encode(), digest_size=6).hexdigest()}-{mark}.safetensors"


def lessons(dense: Dense, pupils: Mapping[Any, Pupil], needed: set[tuple[Any, int]], folder: Path) -> Known:
    """Teach every pupil the first texts; what it knows when, from ``folder`` if it lies there from an earlier start."""
    engine = dense.engine
    if not all(lesson_file(folder, *at).exists() for at in needed):
        for text in range(max(mark for _, mark in needed)):
            run, fills = dense.source(text)
            prompts = [dense.prompt(reader, fills) for reader in dense.task.readers]
            for prompt in prompts:
                dense.hop(prompt, Generate(1), run)
            pairs = dense.take_pairs()
            for key, pupil in pupils.items():
                pupil.learn(pairs, prompts)
                if (key, text + 1) in needed:
                    pupil.memory.save(lesson_file(folder, key, text + 1), engine.identity)
    return {(key, mark): TaughtMemory.load(lesson_file(folder, key, mark), key[0], engine.geometry, engine.identity)
            for key, mark in needed}


def wanted(args: argparse.Namespace) -> list[str]:
    """Labels of what is scored: ``affine@1,10`` is the method ``affine`` after 1 and after 10 texts."""
    out = []
    for part in args.methods.split():
        name, at, marks = part.partition("@")
        out += [f"{name}@{m}" for m in marks.split(",")] if at else [name]
    return out


def family(method: Recipe) -> Any:
    """Methods of one family learn the same from the same hops."""
    return method.corrector, type(method.reference), method.private


def study(args: argparse.Namespace, engine: HFEngine, journal: Journal) -> bool:
    """Measure what is missing; False if the time ran out."""
    began, task, table = time.monotonic(), TASKS[args.task], methods()
    labels = {label: (table[label.partition("@")[0]], int(label.partition("@")[2] or 0)) for label in wanted(args)}
    dense = Dense(engine, task, args.data, args.written_tokens)
    scored = range(args.first, args.first + args.texts)
    todo = [(text, reader) for text in scored for at, reader in enumerate(task.readers)
            if (args.every_reader or text % len(task.readers) == at)
            and any((f"{task.name}/{reader}/{text}", label, 0) not in journal.done for label in labels)]
    if not todo:
        return True
    pupils = {family(method): Pupil(engine, method) for method, m in labels.values() if m}
    needed = {(family(method), m) for method, m in labels.values() if m}
    known = lessons(dense, pupils, needed, args.lessons) if needed else {}
    sessions = {label: Session(engine, method, memory=known.get((family(method), m)))
                for label, (method, m) in labels.items()}
    held: tuple[int, tuple[RunStore, dict[str, Ids]]] | None = None
    for text, reader in todo:
        if time.monotonic() - began > args.seconds:
            return False
        if held is None or held[0] != text:
            held = text, dense.source(text)
        run, fills = held[1]
        prompt = dense.prompt(reader, fills)
        answer = dense.hop(prompt, Generate(args.answer_tokens), run).output_ids or (0,)
        truth = dense.hop(prompt, Force(answer), run)
        dense.take_pairs()
        for label, session in sessions.items():
            question = f"{task.name}/{reader}/{text}"
            if (question, label, 0) in journal.done:
                continue
            if session.recipe.selector.entry is not None:
                fresh = dense.replay(session, fills)
            else:
                fresh = RunStore() if session.recipe.reference.encodes_alone else branch(run, prompt)
            hop = session.hop(prompt, Force(answer), fresh)
            journal.append({"question": question, "method": label, "repeat": 0, "task": task.name, "reader": reader,
                            "text": text, "kl": divergence(truth, hop), "agree": agreement(truth, hop),
                            "answer": len(answer), "shared": hop.shared_tokens, "prompt": hop.prompt_tokens,
                            "reuse": round(hop.effective_reuse_ratio, 4), "learned_bytes": hop.learned_bytes,
                            "actions": sorted({decision.action for decision in hop.decisions})})
    return True


def main() -> int:
    parser = arguments.parser(__doc__, first=40, answer_tokens=25)
    parser.add_argument("--task", default="gsm8k", choices=sorted(TASKS))
    parser.add_argument("--methods", default="full-shared full-shared+4 first shift@10 affine@1,10 hybrid@1,10",
                        help="method, or method@texts learned,..")
    parser.add_argument("--texts", type=int, default=30)
    parser.add_argument("--every-reader", action="store_true", help="score every reader on every text, not in turn")
    parser.add_argument("--written-tokens", type=int, default=72)
    args = arguments.keeps_lessons(parser)
    engine = load(args.model, dtype=args.dtype)
    identity = {"study": "affine", "model": args.model, "dtype": args.dtype, "task": args.task,
                "answer_tokens": args.answer_tokens, "written_tokens": args.written_tokens}
    with Journal.open(args.out, identity, conditions()) as journal:
        return 0 if study(args, engine, journal) else 75


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    raise SystemExit(main())
