"""One method on one engine, taught first and then held still, so that questions do not depend on each other.

    teach   the learn questions, dense, with the method's corrector looking on        -> saved to one file
    score   every question with what that file holds; nothing is learned any more     -> any order, any restart
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class FrozenMemory(Memory):
    """A memory that answers and learns nothing more."""

    def learn(self, edge: Edge, source: KV, target: KV) -> None:
        """Nothing: what was taught stays as it is."""


def teaching(recipe: Recipe) -> Recipe:
    """``recipe`` with every hop dense, so that its corrector sees nothing but exact pairs."""
    return replace(recipe, gate=Never())


def teach(engine: HFEngine, recipe: Recipe, lessons: Iterable[Chain], file: Path) -> None:
    """Learn from the lessons and save to ``file``, whole or not at all; done already if the file is there."""
    if file.exists():
        return
    with Session(engine, teaching(recipe)) as session:
        for lesson in lessons:
            replay(session, lesson)
        session.memory.save(file, engine.identity)


def cast(engine: HFEngine, recipe: Recipe, lessons: Sequence[Chain], file: Path) -> Session:
    """A session of ``recipe`` that knows the lessons, with prefix cache and private text warm."""
    memory: Memory = FrozenMemory(recipe.corrector, engine.geometry)
    if recipe.corrector.learns and lessons:
        teach(engine, recipe, lessons, file)
        memory = FrozenMemory.load(file, recipe.corrector, engine.geometry, engine.identity)
    session = Session(engine, recipe, memory=memory)
    for lesson in lessons[-1:]:
        session.recipe = teaching(recipe)
        replay(session, lesson)
        session.recipe = recipe
    return session


def branch(run: RunStore, prompt: Prompt) -> RunStore:
    """What ``prompt`` would find in ``run``, in a store of its own: a second look does not change the run."""
    copy = RunStore()
    for _, segment, _, _ in prompt.shared():
        held = run.get(segment)
        if held is not None:
            copy.put(segment, held)
    return copy
