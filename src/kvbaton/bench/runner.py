"""`kvbaton eval`: every method on every question, interleaved in one process, resumable at any point.

    learn questions ──▶ dense answers ──▶ each method is taught once and held still
    each question   ──▶ dense answers ──▶ method 1, method 2, … (order turns by one a question) ──▶ one record each

A measure may take a batch of questions at once; its records are written when the batch ends. Dense answers are
decoded for as many questions together as the measure says, when the first of them is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvbaton.bench import data
from kvbaton.bench.cast import cast
from kvbaton.bench.chain import Chain
from kvbaton.bench.conditions import conditions
from kvbaton.bench.measures import Measure, Scene
from kvbaton.bench.play import play
from kvbaton.bench.result import Journal, Key, Record, RunFile, read
from kvbaton.bench.script import Script
from kvbaton.bench.tasks.base import Question, Task
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.sampling import Generate
from kvbaton.engine.session import Session
from kvbaton.errors import Unsupported, UsageError
from kvbaton.recipes import Recipe
from kvbaton.recipes import recipe as recipe_of
from kvbaton.references import Origin

DENSE = "dense"
ANSWERS = "answers/"
"""Records of the dense answers that others are compared with or taught by; reports leave them out."""

SOURCES = replace(recipe_of(DENSE), reference=Origin())
"""Dense prefill that keeps what every text's first reader or its writer holds."""

Step = Callable[[int, int, str], None]
"""Progress: steps done, steps in all, what is being done."""


@dataclass(frozen=True)
class Evaluation:
    """What to measure. ``answer_tokens``: longest dense answer of an agent; an agent's own limit may be lower."""

    task: Task
    methods: tuple[Recipe, ...]
    n: int
    learn: int
    seed: int
    repeats: int
    answer_tokens: int
    measure: Measure

    def __post_init__(self) -> None:
        names = [recipe.name for recipe in self.methods]
        if len(set(names)) != len(names):
            raise UsageError(f"a method is named twice: {', '.join(names)}")
        if self.repeats < 1 or self.answer_tokens < 1:
            raise UsageError("repeats and answer tokens must be 1 or more")

    def recipes(self) -> tuple[Recipe, ...]:
        """The methods, with dense among them: every comparison needs it, and its own noise floor."""
        if any(recipe.name == DENSE for recipe in self.methods):
            return self.methods
        return (recipe_of(DENSE), *self.methods)


def questions(task: Task, rows: Sequence[data.Row], spec: Evaluation) -> tuple[list[Question], list[Question]]:
    """Learn and test questions; rows that the task cannot use are left out before the draw."""
    usable = [row for i, row in enumerate(rows) if task.question(row, i) is not None]
    order = {id(row): i for i, row in enumerate(rows)}
    learn, test = data.split(usable, spec.learn, spec.n, spec.seed)
    made = [[task.question(row, order[id(row)]) for row in part] for part in (learn, test)]
    return [q for q in made[0] if q], [q for q in made[1] if q]


def batches(drawn: Sequence[Question], size: int) -> list[Sequence[Question]]:
    """Cut by the place in the draw, whatever was measured already: a batch that is run again is the same batch."""
    return [drawn[start:start + size] for start in range(0, len(drawn), size)]


def lessons_of(out: Path) -> Path:
    """The folder beside a results file that keeps what methods learned: more questions later need no new lessons."""
    return out.with_suffix("")


def digest(written: str) -> str:
    """Short hash of a recipe's ``repr``: a method of the same name with other hyper-parameters is measured anew."""
    return hashlib.blake2b(written.encode(), digest_size=4).hexdigest()


class Runner:
    """One evaluation on one engine, into one results file."""

    def __init__(self, engine: HFEngine, spec: Evaluation, loaded: data.Loaded, out: Path, step: Step) -> None:
        if engine.text is None:
            raise UsageError("this model has no tokenizer: an evaluation needs text")
        self._engine, self._spec, self._out, self._step = engine, spec, out, step
        self._script = Script(engine.text, spec.task.agents(), engine.eos_ids)
        self._learn, self._test = questions(spec.task, loaded.rows, spec)
        self._together = {question.id: batch for part in (self._learn, self._test)
                          for batch in batches(part, spec.measure.decoded_together) for question in batch}
        self._loaded = loaded
        self._refused: set[str] = set()
        self._writer = Session(engine, recipe_of(DENSE))

    def identity(self) -> Mapping[str, Any]:
        """What the results are about; a file is only gone on with if this is equal."""
        spec, model = self._spec, self._engine.identity
        return {
            "kind": "eval", "task": spec.task.name, "measure": spec.measure.name, **spec.measure.settings,
            "data": self._loaded.source, "data_sha256": self._loaded.sha256, "model": model.name,
            "fingerprint": model.fingerprint, "dtype": str(self._engine.geometry.dtype).removeprefix("torch."),
            "learn": spec.learn, "seed": spec.seed, "answer_tokens": spec.answer_tokens,
        }

    def run(self) -> RunFile:
        """Measure what is not yet in the file; returns the whole of it."""
        made = {**conditions(str(self._engine.device)), "n": self._spec.n, "repeats": self._spec.repeats,
                "recipes": {r.name: repr(r) for r in self._spec.recipes()}}
        with Journal.open(self._out, self.identity(), made) as journal:
            todo = list(self._todo(journal))
            if todo:
                self._measure(journal, todo)
        self._writer.close()
        return read(self._out)

    def _todo(self, journal: Journal) -> Iterator[tuple[int, Sequence[Question], tuple[Recipe, ...]]]:
        """Batches of questions with the methods still to be measured on them, in an order that turns by one a batch."""
        recipes = self._spec.recipes()
        for repeat in range(self._spec.repeats):
            for i, batch in enumerate(batches(self._test, self._spec.measure.batch)):
                turned = recipes[i % len(recipes):] + recipes[:i % len(recipes)]
                left = tuple(r for r in turned if not all(self._known(journal, q, r, repeat) for q in batch))
                if left:
                    yield repeat, batch, left

    def _known(self, journal: Journal, question: Question, recipe: Recipe, repeat: int) -> bool:
        """Measured already, with the same hyper-parameters."""
        return journal.done.get((question.id, recipe.name, repeat), {}).get("recipe") == digest(repr(recipe))

    def _measure(self, journal: Journal, todo: list[tuple[int, Sequence[Question], tuple[Recipe, ...]]]) -> None:
        total = len(self._learn) + sum(len(batch) * len(left) for _, batch, left in todo)
        lessons: list[Chain] = []
        done = 0
        for question in self._learn:
            self._step(done, total, f"dense answers to learn from ({_names(self._together[question.id])})")
            lessons += [turns for turns in self._answers(journal, [question]) if turns]
            done += 1
        with ExitStack() as open_sessions:
            reference = open_sessions.enter_context(Session(self._engine, SOURCES, prefix_cache=False))
            casts: dict[str, Session] = {}
            for repeat, batch, left in todo:
                self._step(done, total, f"{_names(batch)}: dense answers")
                scenes = self._scenes(journal, batch, reference)
                if not scenes:
                    continue
                for recipe in left:
                    if recipe.name not in casts:
                        said = partial(self._taught, recipe.name, done, total)
                        session = cast(self._engine, recipe, lessons, self._learned(recipe), said)
                        casts[recipe.name] = open_sessions.enter_context(session)
                    self._one(journal, repeat, scenes, recipe, casts[recipe.name])
                    done += len(batch)
                    self._step(done, total, f"{_names(batch)}: {recipe.name}")

    def _taught(self, name: str, done: int, total: int, lessons: int) -> None:
        self._step(done, total, f"taught {name} {lessons} texts")

    def _scenes(self, journal: Journal, batch: Sequence[Question], reference: Session) -> list[Scene]:
        """Questions made ready, without those whose prompts exceed the context."""
        measure = self._spec.measure
        chains: Sequence[Chain | None] = self._answers(journal, batch) if measure.needs_answers else [()] * len(batch)
        scenes = [Scene(self._spec.task, self._script, question, turns)
                  for question, turns in zip(batch, chains, strict=True) if turns is not None]
        for scene in scenes:
            measure.open(scene, reference)
        return scenes

    def _one(self, journal: Journal, repeat: int, scenes: Sequence[Scene], recipe: Recipe, session: Session) -> None:
        """Measure a method on a batch; what a kill left of it on file stands.

        A method that cannot run on this model is noted and left out; dense cannot be.
        """
        if recipe.name in self._refused:
            return
        try:
            found = self._spec.measure.measure(scenes, session, repeat)
        except (UsageError, Unsupported) as refusal:
            if recipe.name == DENSE:
                raise
            self._refused.add(recipe.name)
            found = [{"question": f"{ANSWERS}refused", "refused": str(refusal)}]
        for scene, record in zip(scenes, found, strict=False):
            if not self._known(journal, scene.question, recipe, repeat):
                journal.append({"question": scene.question.id, "method": recipe.name, "repeat": repeat,
                                "recipe": digest(repr(recipe)), **record})

    def _learned(self, recipe: Recipe) -> Path:
        """Where what a method learned lies; another name for other settings or other learn questions."""
        made_by = hashlib.blake2b(repr((recipe, sorted(self.identity().items()))).encode(), digest_size=6).hexdigest()
        return lessons_of(self._out) / f"{recipe.name}-{made_by}.safetensors"

    def _answers(self, journal: Journal, batch: Sequence[Question]) -> list[Chain | None]:
        """The team's dense answers, from the file if they are there; None where a prompt exceeds the context."""
        for question in batch:
            if _answers_of(question) not in journal.done:
                self._answer(journal, self._together[question.id])
        return [self._chain(question, journal.done[_answers_of(question)]) for question in batch]

    def _answer(self, journal: Journal, batch: Sequence[Question]) -> None:
        """Generate the dense answers of a batch; what a kill left of it on file stands."""
        for question, record in zip(batch, self._generate(batch), strict=True):
            if _answers_of(question) not in journal.done:
                name, method, repeat = _answers_of(question)
                journal.append({"question": name, "method": method, "repeat": repeat, **record})

    def _chain(self, question: Question, answers: Record) -> Chain | None:
        if answers.get("skipped"):
            return None
        return self._script.turns(question, {agent: tuple(ids) for agent, ids in answers["outputs"].items()})

    def _generate(self, batch: Sequence[Question]) -> list[Record]:
        most = self._spec.answer_tokens
        plays = play(self._writer, self._script, batch,
                     lambda agent: Generate(min(agent.max_new_tokens or most, most)))
        return [{"skipped": str(one.too_long)} if one.too_long is not None else
                {"outputs": {agent: list(ids) for agent, ids in one.outputs.items()}} for one in plays]


def _answers_of(question: Question) -> Key:
    """Where a question's dense answers stand in a results file."""
    return f"{ANSWERS}{question.id}", DENSE, 0


def _names(batch: Sequence[Question]) -> str:
    first, last = batch[0].id, batch[-1].id
    return f"question {first}" if len(batch) == 1 else f"{len(batch)} questions, {first} to {last}"
