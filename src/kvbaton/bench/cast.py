"""One method on one engine, taught first and then held still, so that questions do not depend on each other.

    teach   the learn questions, dense, with the method's corrector looking on        -> saved, text by text
    score   every question with what was saved; nothing is learned any more           -> any order, any restart
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from kvbaton.bench.chain import Chain, replay
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.session import Session
from kvbaton.gates import Never
from kvbaton.kv import KV
from kvbaton.memory import Memory
from kvbaton.prompt import Edge, Prompt
from kvbaton.recipes import Recipe
from kvbaton.references import RunStore


class TaughtMemory(Memory):
    """A memory that learns while ``learning`` is set, and else only answers."""

    learning = False

    def learn(self, edge: Edge, source: KV, target: KV) -> None:
        """As `Memory.learn`, or nothing."""
        if self.learning:
            super().learn(edge, source, target)


def teaching(recipe: Recipe) -> Recipe:
    """``recipe`` with every hop dense, so that its corrector sees nothing but exact pairs."""
    return replace(recipe, gate=Never())


def cast(engine: HFEngine, recipe: Recipe, lessons: Sequence[Chain], file: Path,
         said: Callable[[int], None] = lambda done: None) -> Session:
    """A session of ``recipe`` that has learned from the lessons and learns no more, with everything warm.

    What was learned lies in ``file`` once all of it is there; until then a file a lesson lets a restart go on.
    ``said`` is called with the number of lessons learned from.
    """
    memory = TaughtMemory(recipe.corrector, engine.geometry)
    session = Session(engine, teaching(recipe), memory=memory)
    if recipe.corrector.learns and lessons:
        if not file.exists():
            _teach(engine, recipe, lessons, file, said)
        session.close()
        memory = TaughtMemory.load(file, recipe.corrector, engine.geometry, engine.identity)
        session = Session(engine, teaching(recipe), memory=memory)
    for lesson in lessons[-1:]:
        replay(session, lesson)
    session.follow(recipe)
    return session


def taught(engine: HFEngine, recipe: Recipe, lessons: Sequence[Chain]) -> Session:
    """As `cast`, with what was learned in memory alone."""
    memory = TaughtMemory(recipe.corrector, engine.geometry)
    with ExitStack() as stack:
        session = stack.enter_context(Session(engine, teaching(recipe), memory=memory))
        memory.learning = True
        for lesson in lessons if recipe.corrector.learns else lessons[-1:]:
            replay(session, lesson)
        memory.learning = False
        session.follow(recipe)
        stack.pop_all()
    return session


def _teach(engine: HFEngine, recipe: Recipe, lessons: Sequence[Chain], file: Path, said: Callable[[int], None]) -> None:
    memory = TaughtMemory(recipe.corrector, engine.geometry)
    done = max((n for n in range(1, len(lessons) + 1) if _part(file, n).exists()), default=0)
    if done:
        memory = TaughtMemory.load(_part(file, done), recipe.corrector, engine.geometry, engine.identity)
    with Session(engine, teaching(recipe), memory=memory) as session:
        for lesson in lessons[:done][-1:]:
            replay(session, lesson)
        memory.learning = True
        for number, lesson in enumerate(lessons[done:], done + 1):
            replay(session, lesson)
            memory.save(_part(file, number), engine.identity)
            _part(file, number - 1).unlink(missing_ok=True)
            said(number)
    _part(file, len(lessons)).replace(file)


def _part(file: Path, lessons: int) -> Path:
    """Where what was learned from the first ``lessons`` lies."""
    return file.with_name(f"{file.stem}.{lessons}{file.suffix}")


def branch(run: RunStore, prompt: Prompt) -> RunStore:
    """What ``prompt`` would find in ``run``, in a store of its own: a second look does not change the run."""
    copy = RunStore()
    for _, segment, _, _ in prompt.shared():
        held = run.get(segment)
        if held is not None:
            copy.put(segment, held)
    return copy
