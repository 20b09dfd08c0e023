"""Chains of agents, hop by hop: `python docs/results/affine/chains.py --help`.

    a0 reads the question; a1 reads question and a0's answer; a2 reads question and a1's answer; ...

Each agent's answer is the dense one, forced, so that divergence is compared token by token; what an agent hands on is
what it holds: approximate keys and values from the second agent on. *star*: a text is always taken from its first
owner (`Origin`); *chain*: from the agent before (`Chained`). The first four agents are the chain of four.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import arguments
import torch
from tasks import TASKS

from kvbaton.bench.cast import cast
from kvbaton.bench.chain import Turn, dense_chain, divergence, replay
from kvbaton.bench.conditions import conditions
from kvbaton.bench.result import Journal, read
from kvbaton.bench.stats import mean_interval, ratio_of_means
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.models import load
from kvbaton.engine.session import Session
from kvbaton.gates import Always
from kvbaton.prompt import Prompt
from kvbaton.recipes import Recipe, recipe
from kvbaton.references import Chained, Origin, Reference
from kvbaton.templates import Template

ROLES = (
    "You are a careful maths tutor. Work through the problem one step at a time.",
    "You check other people's reasoning. Point out every slip you can find and say how to mend it.",
    "You are an editor who rewrites text for a school newspaper in short plain sentences.",
    "You are the head of a jury. Weigh what you are given and announce one final verdict.",
    "You translate sums into equations. Name every unknown before you use it.",
    "You are a bookkeeper. List every amount with its unit and where it comes from.",
    "You teach children of eight years. Explain with things that they can touch.",
    "You write the minutes of a meeting: who said what, and what was agreed.",
)
Ids = tuple[int, ...]


def prompt(engine: HFEngine, agent: int, question: Ids, before: Ids | None) -> Prompt:
    """What agent number ``agent`` reads; ``before`` is the answer of the agent in front of it."""
    assert engine.text is not None
    heard = f"\n\nThe colleague before you wrote:\n{{a{agent - 1}}}" if agent else ""
    fills = {"question": question} | ({} if before is None else {f"a{agent - 1}": before})
    user = Template.parse(f"{{question}}{heard}\n\nDo your part now.")
    return engine.text.prompt(f"a{agent}", Template.parse(ROLES[agent]), user, fills)


class Chains:
    """Turns of the dense chain over each text; answers are kept in ``folder``."""

    def __init__(self, engine: HFEngine, data: Path, folder: Path, agents: int, answer_tokens: int) -> None:
        self._engine, self._folder, self._agents, self._tokens = engine, folder, agents, answer_tokens
        self._texts = TASKS["gsm8k"].texts(data)

    def turns(self, text: int) -> list[Turn]:
        engine, kept = self._engine, self._folder / f"answers-{self._agents}-{text}.json"
        assert engine.text is not None
        question = tuple(engine.text.encode(self._texts[text]["question"]))
        if not kept.exists():
            def reader(agent: int, answers: dict[str, Ids]) -> Prompt:
                return prompt(engine, agent, question, answers.get(f"a{agent - 1}"))

            hops = [(lambda answers, agent=at: reader(agent, answers), f"a{at}") for at in range(self._agents)]
            kept.write_text(json.dumps([turn.answer for turn in dense_chain(engine, hops, self._tokens)]))
        answers = [tuple(answer) for answer in json.loads(kept.read_text())]
        return [Turn(prompt(engine, at, question, answers[at - 1] if at else None), answer, f"a{at}")
                for at, answer in enumerate(answers)]


def methods() -> dict[str, Recipe]:
    """Every method from the origin (star) and from the agent before (chain), all with the same first four rows."""
    table = {}
    references: dict[str, Reference] = {"star": Origin(), "chain": Chained()}
    for name in ("full-shared", "affine", "hybrid", "kvcmas"):
        for shape, reference in references.items():
            table[f"{name} {shape}"] = replace(recipe(name), gate=Always(), reference=reference, lead_rows=4)
    return table


def study(args: argparse.Namespace, engine: HFEngine, journal: Journal) -> bool:
    """Measure what is missing; False if the time ran out."""
    until = time.monotonic() + args.seconds
    chains = Chains(engine, args.data, args.lessons, args.agents, args.answer_tokens)
    scored = range(args.first, args.first + args.texts)
    last = args.agents - 1
    todo = {label: [text for text in scored if (f"{text}/{last}", label, 0) not in journal.done] for label in methods()}
    if not any(todo.values()):
        return True
    lessons = [chains.turns(text) for text in range(args.lessons_count)]
    sessions = {label: cast(engine, method, lessons, args.lessons / f"{label.replace(' ', '-')}.safetensors")
                for label, method in methods().items() if todo[label]}
    with Session(engine, recipe("dense")) as dense:
        for text in scored:
            turns, truth = chains.turns(text), None
            for label, session in sessions.items():
                if text not in todo[label]:
                    continue
                if time.monotonic() > until:
                    return False
                truth = truth or replay(dense, turns)
                for at, hop in enumerate(replay(session, turns)):
                    if at:
                        journal.append({"question": f"{text}/{at}", "method": label, "repeat": 0, "text": text,
                                        "agent": at, "kl": divergence(truth[at], hop)})
    return True


def summary(file: Path) -> list[str]:
    """Markdown: divergence by agent, and what is recovered of full-shared's in a chain of four and of all."""
    run = read(file)
    kl: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for record in run.records:
        kl[record["method"]][record["text"], record["agent"]] = record["kl"]
    agents = sorted({agent for rows in kl.values() for _, agent in rows})
    texts = len({text for text, _ in kl["full-shared chain"]})
    lines = [f"{texts} texts; KL by agent, nats a token; recovered of `full-shared chain`, 95 % over texts.", "",
             f"| method | {' | '.join(f'a{agent}' for agent in agents)} | chain of 4 | chain of {len(agents) + 1} |",
             "|---" * (len(agents) + 3) + "|"]
    for method, rows in kl.items():
        means = [mean_interval([rows[key] for key in rows if key[1] == agent]).value for agent in agents]
        kept = [_recovered(rows, kl["full-shared chain"], [a for a in agents if a < size])
                for size in (4, len(agents) + 1)]
        lines.append(f"| {method} | {' | '.join(f'{mean:.4f}' for mean in means)} | {kept[0]} | {kept[1]} |")
    return lines


def _recovered(rows: dict[tuple[int, int], float], base: dict[tuple[int, int], float], agents: Sequence[int]) -> str:
    texts = sorted({text for text, _ in rows} & {text for text, _ in base})
    sums = [[sum(side[text, agent] for agent in agents) for text in texts] for side in (rows, base)]
    ratio = ratio_of_means(*sums)
    return f"{1 - ratio.value:.2f} ({1 - ratio.high:.2f} to {1 - ratio.low:.2f})"


def main() -> int:
    parser = arguments.parser(__doc__, first=40, answer_tokens=24)
    parser.add_argument("--agents", type=int, default=len(ROLES))
    parser.add_argument("--lessons-count", type=int, default=10)
    parser.add_argument("--texts", type=int, default=12)
    args = arguments.keeps_lessons(parser)
    engine = load(args.model, dtype=args.dtype)
    identity = {"study": "chains", "model": args.model, "dtype": args.dtype, "agents": args.agents,
                "answer_tokens": args.answer_tokens, "lessons": args.lessons_count}
    with Journal.open(args.out, identity, conditions()) as journal:
        done = study(args, engine, journal)
    print("\n".join(summary(args.out)))
    return 0 if done else 75


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    raise SystemExit(main())
