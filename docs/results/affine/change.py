"""An edge that changes between learning and use: `python docs/results/affine/change.py --help`.

    topic    ten questions learned, then documents in the same slot: with and without forgetting, on new and old texts
    prefix   the reader's own text before the segment is short, middling or long: maps learned at one length, used at
             another. The edge stays the same, because the notes fill a placeholder

Rows are appended to --out; lessons are learned anew at every start.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import arguments
import torch
from study import Dense, Pupil
from tasks import TASKS, Task

from kvbaton.bench.cast import TaughtMemory, branch
from kvbaton.bench.chain import divergence
from kvbaton.bench.conditions import conditions
from kvbaton.bench.result import Journal, read
from kvbaton.bench.stats import mean_interval, ratio_of_means
from kvbaton.correctors.affine import Affine
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.models import load
from kvbaton.engine.sampling import Force, Generate
from kvbaton.engine.session import Session
from kvbaton.gates import Always
from kvbaton.recipes import Recipe, recipe

HOUSE_RULES = " ".join(f"Rule {n}: {text}" for n, text in enumerate((
    "be polite to everybody.", "give every amount with its unit.", "do not repeat what was said before.",
    "name the page on which you found a fact.", "write numbers below ten as words.", "leave out what nobody asked for.",
    "say so when you are not sure.", "use no foreign words.", "keep to the order of the text.",
    "one thought a sentence.", "mark every guess as one.", "never promise a result.") * 2, 1))


@dataclass(frozen=True)
class Scene:
    """``lessons`` in their order, scored after ``marks`` of them on ``tests``, a name for each."""

    name: str
    lessons: tuple[tuple[Task, int], ...]
    marks: tuple[int, ...]
    tests: tuple[tuple[str, Task], ...]
    rules: tuple[tuple[str, Affine], ...]


def topic() -> list[Scene]:
    old, other = TASKS["gsm8k"], TASKS["hotpotqa"]
    new = replace(old, name="documents", max_tokens=120, texts=lambda folder: [
        {"question": text["documents"]} for text in other.texts(folder)])
    lessons = [(old, text) for text in range(10)] + [(new, text) for text in range(10)]
    fades = tuple((f"forget {forget}", Affine(forget=forget)) for forget in (1.0, 0.9, 0.8, 0.7))
    alone = Scene("new topic alone", tuple(lessons[10:]), (1, 3, 10), (("new", new),), fades[:1])
    return [Scene("topic", tuple(lessons), (10, 11, 13, 20), (("new", new), ("old", old)), fades), alone]


def prefix() -> list[Scene]:
    base = TASKS["gsm8k"]
    ask = {base.source: base.ask["*"], "*": "House rules: {notes}\n\n{question}\n\nDo your part now."}

    def noted(words: int) -> Task:
        notes = " ".join(HOUSE_RULES.split()[:words])
        return replace(base, name=f"notes-{words}", ask=ask, private=frozenset({"notes"}), texts=lambda folder: [
            text | {"notes": notes} for text in base.texts(folder)])

    lengths = [noted(words) for words in (2, 40, 160)]
    tests = tuple((task.name, task) for task in lengths)
    rule = (("affine", Affine()),)
    scenes = [Scene(f"learned at {task.name}", tuple((task, text) for text in range(10)), (10,), tests, rule)
              for task in lengths]
    mixed = tuple((lengths[text % 3], text) for text in range(10))
    return [*scenes, Scene("learned at all three", mixed, (10,), tests, rule)]


def _method(rule: Affine) -> Recipe:
    return replace(recipe("affine"), gate=Always(), corrector=rule)


def teach(scene: Scene, denses: dict[str, Dense], engine: HFEngine, folder: Path) -> dict[str, TaughtMemory]:
    """What each rule knows after each mark, by the label that its rows have."""
    pupils = {name: Pupil(engine, _method(rule)) for name, rule in scene.rules}
    known = {}
    for number, (task, text) in enumerate(scene.lessons, 1):
        dense = denses[task.name]
        run, fills = dense.source(text)
        prompts = [dense.prompt(reader, fills) for reader in task.readers]
        for prompt in prompts:
            dense.hop(prompt, Generate(1), run)
        pairs = dense.take_pairs()
        for name, pupil in pupils.items():
            pupil.learn(pairs, prompts)
            if number in scene.marks:
                file = folder / "change.safetensors"
                pupil.memory.save(file, engine.identity)
                known[f"{scene.name}, {name}@{number}"] = TaughtMemory.load(
                    file, pupil.method.corrector, engine.geometry, engine.identity)
    return known


def play(scene: Scene, engine: HFEngine, args: argparse.Namespace, journal: Journal) -> bool:
    """Measure what is missing of a scene; False if the time ran out."""
    bare = {"full-shared": recipe("full-shared"), "full-shared+4": replace(recipe("full-shared"), lead_rows=4)}
    labels = [*bare, *(f"{scene.name}, {name}@{mark}" for name, _ in scene.rules for mark in scene.marks)]
    tasks = {task.name: task for task, _ in scene.lessons} | {task.name: task for _, task in scene.tests}
    scored = {(test, text) for test, _ in scene.tests for text in range(args.first, args.first + args.texts)
              if any((f"{test}/{text}", label, 0) not in journal.done for label in labels)}
    if not scored:
        return True
    denses = {name: Dense(engine, task, args.data, 0) for name, task in tasks.items()}
    sessions = {name: Session(engine, replace(method, gate=Always())) for name, method in bare.items()}
    rules = dict(scene.rules)
    for label, memory in teach(scene, denses, engine, args.out.parent).items():
        rule = rules[label.rpartition(", ")[2].partition("@")[0]]
        sessions[label] = Session(engine, _method(rule), memory=memory)
    for test, text in sorted(scored):
        if time.monotonic() > args.until:
            return False
        task = dict(scene.tests)[test]
        dense, reader = denses[task.name], task.readers[text % len(task.readers)]
        run, fills = dense.source(text)
        prompt = dense.prompt(reader, fills)
        answer = dense.hop(prompt, Generate(args.answer_tokens), run).output_ids or (0,)
        truth = dense.hop(prompt, Force(answer), run)
        dense.take_pairs()
        for label in labels:
            if (f"{test}/{text}", label, 0) not in journal.done:
                hop = sessions[label].hop(prompt, Force(answer), branch(run, prompt))
                journal.append({"question": f"{test}/{text}", "method": label, "repeat": 0, "test": test,
                                "kl": divergence(truth, hop), "before": prompt.prefix_tokens})
    return True


def summary(file: Path) -> list[str]:
    """Markdown: mean divergence of each map on each kind of text, and what it recovers of full-shared's."""
    kl: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in read(file).records:
        kl[record["test"]][record["method"]][record["question"]] = record["kl"]
    lines = []
    for test, by_method in kl.items():
        base = by_method["full-shared"]
        lines += [f"**{test}**, {len(base)} texts", "", "| map | KL, nats a token | recovered (95 %) | worse |",
                  "|---|---|---|---|"]
        for method, rows in by_method.items():
            texts = sorted(rows)
            mine, theirs = [rows[text] for text in texts], [base[text] for text in texts]
            ratio = ratio_of_means(mine, theirs)
            kept = "-" if method == "full-shared" else (f"{1 - ratio.value:.2f} ({1 - ratio.high:.2f} to "
                                                        f"{1 - ratio.low:.2f})")
            worse = sum(one > two for one, two in zip(mine, theirs, strict=True))
            lines.append(f"| {method} | {mean_interval(mine).value:.5f} | {kept} | {worse}/{len(texts)} |")
        lines.append("")
    return lines


def main() -> int:
    parser = arguments.parser(__doc__, first=40, answer_tokens=17)
    parser.add_argument("--change", choices=("topic", "prefix"), default="topic")
    parser.add_argument("--texts", type=int, default=12)
    args = parser.parse_args()
    args.until = time.monotonic() + args.seconds
    engine = load(args.model, dtype=args.dtype)
    identity = {"study": f"change-{args.change}", "model": args.model, "dtype": args.dtype,
                "answer_tokens": args.answer_tokens}
    with Journal.open(args.out, identity, conditions()) as journal:
        done = all(play(scene, engine, args, journal) for scene in (topic() if args.change == "topic" else prefix()))
    print("\n".join(summary(args.out)))
    return 0 if done else 75


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    raise SystemExit(main())
