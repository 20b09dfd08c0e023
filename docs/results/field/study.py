"""The field in one table: every published method on the same prompts, model and pass.

    python docs/results/field/study.py teams        GSM8K: four agents, three hops behind the source hop
    python docs/results/field/study.py evidence     HotpotQA: ten paragraphs, each read before by a keeper of its own
    python docs/results/field/study.py coverage     KV error removed on GSM8K, beside random rows at the same budget
    python docs/results/field/study.py cost         price of selective recompute at 4,096 tokens
    … teams --timed 4, … evidence --timed 3         TTFT: a few questions, every method in one run, on a quiet machine
    python docs/results/field/study.py table        README.md from everything that is there

Every method is forced to the same answers, from the data sets; methods take turns within a question, so times are of
one run. Results lie beside this file, one JSON line a question and method; every step goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvbaton.bench import data
from kvbaton.bench.accounting import nominal_reuse
from kvbaton.bench.cast import TaughtMemory, teaching
from kvbaton.bench.chain import Chain, Turn, agreement, divergence, replay
from kvbaton.bench.conditions import conditions
from kvbaton.bench.cost import selective_cost
from kvbaton.bench.coverage import Ruler
from kvbaton.bench.script import Script
from kvbaton.bench.stats import mean_interval, median, paired_difference
from kvbaton.bench.tasks import Question, task
from kvbaton.engine.capture import Capture, Captures
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.models import load
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Force
from kvbaton.engine.session import Session
from kvbaton.memory import Memory
from kvbaton.overrides import override
from kvbaton.prompt import Prompt, Span
from kvbaton.recipes import PrivateText, Recipe, recipe
from kvbaton.references import ALONE, RunStore

HERE = Path(__file__).parent
SELECTIVE = ("full-shared", "droidspeak", "cacheblend", "cacheblend-bottomright", "relaycaching", "epic", "prophetkv",
             "random-matched")
LEARNING = ("graphflow", "kvcomm", "kvcomm-open", "kvcomm-upstream-open", "kvcmas",
            "affine", "hybrid")
VARIANTS = {
    # CacheBlend's effective budget at 15 % on 30 layers: (2 + 0.15 x 28) / 30.
    "random-matched": ("random", "selector.share=0.207"),
    # With the gate open, so that both forms of offset are seen on every text that some message is as long as.
    "kvcomm-open": ("kvcomm", "gate.gamma=1"), "kvcomm-upstream-open": ("kvcomm-upstream", "gate.gamma=1"),
}
PAIRS = (("cacheblend", "random-matched"), ("cacheblend", "cacheblend-bottomright"),
         ("kvcomm-open", "kvcomm-upstream-open"), ("affine", "kvcmas"), ("hybrid", "kvcmas"), ("hybrid", "cacheblend"))
"""Comparisons that were expected to favour the first."""
LEARN, QUESTIONS = 10, 20


def method(name: str) -> Recipe:
    """A recipe, or a variant of one under its own name."""
    if name not in VARIANTS:
        return recipe(name)
    base, setting = VARIANTS[name]
    return replace(override(recipe(base), setting), name=name)


class Journal:
    """One JSON line a question and method, appended as soon as it is known."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.done = {(line["question"], line["method"]) for line in lines(file)}

    def add(self, question: str, name: str, hops: Sequence[HopResult], truth: Sequence[HopResult]) -> None:
        pairs = list(zip(truth, hops, strict=True))
        line = {"question": question, "method": name,
                "kl": [round(divergence(a, b), 6) for a, b in pairs], "agree": [agreement(a, b) for a, b in pairs],
                "reuse": [round(hop.effective_reuse_ratio, 4) for hop in hops], "dense": [hop.dense for hop in hops],
                "ttft_s": [round(hop.ttft_s, 4) for hop in hops], "extra": [hop.extra_entries for hop in hops],
                "held_mib": round(max(hop.held_bytes for hop in hops) / 2**20, 1),
                "boundary_mib": round(max(hop.boundary_bytes for hop in hops) / 2**20, 1),
                "learned_mib": round(max(hop.learned_bytes for hop in hops) / 2**20, 1)}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.done.add((question, name))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def drawn(name: str, folder: Path | None, learn: int, n: int) -> tuple[list[Question], list[Question]]:
    """Questions to learn from and to score, as `kvbaton eval` draws them with seed 0."""
    chosen = task(name)
    rows = data.load(chosen.data_set, None, folder).rows
    places = {id(row): i for i, row in enumerate(rows)}
    usable = [row for row in rows if chosen.question(row, 0) is not None]
    parts = data.split(usable, learn, n, 0)
    made = [[chosen.question(row, places[id(row)]) for row in part] for part in parts]
    return [q for q in made[0] if q], [q for q in made[1] if q]


def turned(names: Sequence[str], at: int) -> Sequence[str]:
    """Methods in an order that turns by one a question."""
    return [*names[at % len(names):], *names[:at % len(names)]]


def chains(engine: HFEngine, questions: Sequence[Question]) -> list[Chain]:
    """A GSM8K team whose answers are given: parts of the data set's worked solution, so that nothing is decoded."""
    assert engine.text is not None
    script = Script(engine.text, task("gsm8k").agents(), engine.eos_ids)
    out: list[Chain] = []
    for question in questions:
        worked, final = script.ids(question.row["answer"].partition("####")[0]), question.gold.split()[-1]
        answers = {"solver": worked[:40], "analyst": worked[-40:], "judge": script.ids(question.gold),
                   "programmer": script.ids(f"result = {final}\nprint(result)\nFinal answer: {final}")}
        out.append([Turn(script.prompt(agent, question, answers), answers[agent.name], agent.name)
                    for agent in script.agents])
    return out


def taught(engine: HFEngine, name: str, lessons: Sequence[Chain], runs: Path) -> Memory:
    """What a method learned from ``lessons``, kept in ``runs``."""
    chosen, file = method(name), runs / f"{name}.kvb"
    if not file.exists():
        with Session(engine, teaching(chosen)) as teacher:
            for chain in lessons:
                replay(teacher, chain)
            teacher.memory.save(file, engine.identity)
    return Memory.load(file, chosen.corrector, engine.geometry, engine.identity)


def sessions(engine: HFEngine, lessons: Sequence[Chain], names: Sequence[str], runs: Path) -> dict[str, Session]:
    """A session a method, taught, then held still and warm. KVCOMM's forms learn the same states and share them."""
    out = {}
    memories: dict[str, Memory] = {}
    for name in names:
        chosen = method(name)
        memory = TaughtMemory(chosen.corrector, engine.geometry)
        if chosen.corrector.learns:
            family = "kvcomm" if name.startswith("kvcomm") else name
            known = memories.setdefault(family, memories.get(family) or taught(engine, family, lessons, runs))
            for edge in known.edges():
                state = known.state(edge)
                assert state is not None
                memory.keep(edge, state)
        session = out[name] = Session(engine, chosen, memory=memory)
        for turn in lessons[-1] if lessons else ():
            if chosen.private is PrivateText.ANCHORED:
                session.hop(turn.prompt, Force((1,)), session.start_run())
            else:
                warm(session, turn.prompt)
    return out


def warm(session: Session, prompt: Prompt) -> None:
    """Fill the prefix cache with a prompt's role text."""
    session.hop(Prompt(prompt.reader, prompt.segments[:1]), Force((1,)), session.start_run())


def teams(engine: HFEngine, folder: Path | None, runs: Path, names: Sequence[str], out: Path, n: int) -> None:
    journal = Journal(out)
    learn, every = drawn("gsm8k", folder, LEARN, QUESTIONS)
    score = every[:n]
    left = [q for q in score if any((q.id, name) not in journal.done for name in names)]
    open_sessions = sessions(engine, chains(engine, learn), names, runs)
    others = [name for name in names if name != "dense"]
    for question, chain in zip(left, chains(engine, left), strict=True):
        truth = replay(open_sessions["dense"], chain)
        if (question.id, "dense") not in journal.done:
            journal.add(question.id, "dense", truth[1:], truth[1:])
        for name in turned(others, score.index(question)):
            if (question.id, name) not in journal.done:
                journal.add(question.id, name, replay(open_sessions[name], chain)[1:], truth[1:])
        print(time.strftime("%T"), question.id, flush=True)


def evidence(engine: HFEngine, folder: Path | None, runs: Path, names: Sequence[str], out: Path, n: int) -> None:
    """Keepers read alike for every method: their KV is made once a question. Lessons are the draw's next questions."""
    journal = Journal(out)
    _, drawn_ones = drawn("hotpotqa-evidence", folder, 0, QUESTIONS + LEARN)
    score, learn = drawn_ones[:n], drawn_ones[QUESTIONS:]
    assert engine.text is not None
    script = Script(engine.text, task("hotpotqa-evidence").agents(), engine.eos_ids)
    reader = next(agent for agent in script.agents if agent.name == "reader")
    entries = sorted({method(name).selector.entry for name in names} - {None}) or [None]
    silent = {agent.name: () for agent in script.agents}
    lessons = [script.turns(question, silent | {"reader": script.ids(question.gold)}) for question in learn]
    runs.mkdir(parents=True, exist_ok=True)
    open_sessions = sessions(engine, lessons, names, runs)
    for question in score:
        if all((question.id, name) in journal.done for name in names):
            continue
        asked = script.prompt(reader, question, {})
        answer = Force(script.ids(question.gold))
        with Session(engine, recipe("dense"), prefix_cache=False) as reference:
            truth = reference.hop(asked, answer, RunStore())
        kept, alone = RunStore(), RunStore()
        for agent in script.agents:
            if agent is not reader:
                hand_in(engine, script.prompt(agent, question, {}), kept, alone, entries)
        for name in turned(names, score.index(question)):
            session = open_sessions[name]
            if (question.id, name) not in journal.done:
                warm(session, asked)
                store = RunStore(dict((alone if session.recipe.reference.encodes_alone else kept)._held))
                journal.add(question.id, name, [session.hop(asked, answer, store)], [truth])
        print(time.strftime("%T"), question.id, flush=True)


@torch.no_grad()
def hand_in(engine: HFEngine, prompt: Prompt, kept: RunStore, alone: RunStore, entries: Sequence[int | None]) -> None:
    """What a keeper holds of its text after a dense hop, with hidden states at every entry, and the text alone."""
    _, segment, span, _ = next(prompt.shared())
    for store, before, at, role in ((kept, prompt, span, prompt.role),
                                    (alone, Prompt("alone", (segment,)), Span(0, len(segment)), ALONE)):
        captures = [Capture.empty(at, engine.geometry, engine.device, entry) for entry in entries]
        engine.forward(engine.new_cache(len(before)), engine.tensor(before.token_ids), engine.rows(0, len(before)),
                       Captures(captures))
        held = [capture.kv(role, exact=True) for capture in captures]
        store.put(segment, replace(held[0], boundary=tuple(pair for kv in held for pair in kv.boundary)))


def coverage(engine: HFEngine, folder: Path | None, n: int, names: Sequence[str]) -> None:
    """Append one JSON line a method that is not there yet."""
    out = HERE / "coverage.jsonl"
    done = {line["method"] for line in lines(out)}
    learn, score = drawn("gsm8k", folder, LEARN, n)
    lessons, scored = chains(engine, learn), chains(engine, score)
    whole = Ruler(engine, scored)
    peers = Ruler(engine, scored, frozenset(agent.name for agent in task("gsm8k").agents()))
    for name in (m for m in names if m not in done and m != "dense"):
        taught_by = lessons if method(name).corrector.learns else ()
        found = whole.coverage(method(name), taught_by)
        line = {"method": name, "n": n, "learn": len(taught_by), **asdict(found),
                "layers": [round(x, 4) for x in found.layers],
                "peers": round(peers.coverage(method(name), taught_by).total, 4) if taught_by else None}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(name, f"{found.total:.3f} at budget {found.budget:.3f}, random {found.random:.3f}", flush=True)


def cost(engine: HFEngine, tokens: int, repeats: int) -> None:
    chosen = [override(recipe(name), "selector.share=0.1") for name in ("cacheblend", "random")]
    found = selective_cost(engine, chosen, tokens, repeats)
    record = {"conditions": conditions(str(engine.device)), "repeats": repeats, "costs": [asdict(c) for c in found]}
    (HERE / "cost.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    for c in found:
        print(c.method, f"predicted {c.predicted:.3f} measured {c.measured:.3f} page-rounded {c.page_rounded:.3f}")


def table() -> str:
    """The README beside this file."""
    parts = [part.read_text().rstrip() for part in (HERE / "head.md",) if part.exists()]
    covered = {line["method"]: line for line in lines(HERE / "coverage.jsonl")}
    for name, more in (("gsm8k", covered), ("hotpotqa-evidence", {})):
        found, timed = (complete(lines(HERE / f"{name}{end}.jsonl")) for end in ("", "-ttft"))
        if found:
            questions = len(next(iter(found.values())))
            parts.append(f"## {name}, {questions} questions\n\n" + markdown(HEAD + (COVERAGE if more else []), [
                row(m, found, timed, more.get(m), bool(more)) for m in found]))
            parts.append("KL, first minus second, paired over questions (95 %): "
                         + "; ".join(pair(found, *p) for p in PAIRS if set(p) <= set(found)) + ".")
    if (HERE / "cost.json").exists():
        parts.append(cost_table(json.loads((HERE / "cost.json").read_text())))
    parts += [part.read_text().rstrip() for part in (HERE / "findings.md",) if part.exists()]
    return "\n\n".join(parts) + "\n"


HEAD = ["method", "nominal reuse", "effective reuse", "hops reused", "KL to dense (95 %)", "top-1 agreement",
        "TTFT speed-up", "boundary MiB", "learned MiB"]
COVERAGE = ["budget", "coverage", "random", "times random", "coverage of peer answers"]
Found = dict[str, dict[str, dict[str, Any]]]


def complete(records: list[dict[str, Any]]) -> Found:
    """Records by method and question, for the questions that every method has. A method with few is left out."""
    by: Found = {}
    for record in records:
        by.setdefault(record["method"], {})[record["question"]] = record
    most = max((len(questions) for questions in by.values()), default=0)
    by = {m: questions for m, questions in by.items() if len(questions) >= 0.8 * most}
    common = set.intersection(*(set(q) for q in by.values())) if by else set()
    order = [m for m in ("dense", *SELECTIVE, *LEARNING) if m in by]
    return {m: {q: by[m][q] for q in sorted(common)} for m in order}


def over_questions(found: Found, name: str, what: str) -> list[float]:
    return [sum(map(float, r[what])) / len(r[what]) for r in found[name].values()]


def row(name: str, found: Found, timed: Found, covered: dict[str, Any] | None, wide: bool) -> list[str]:
    nominal, kl = nominal_reuse(method(name), 30), mean_interval(over_questions(found, name, "kl"))
    mean = {what: mean_interval(over_questions(found, name, what)).value for what in ("agree", "reuse", "dense")}
    records = list(found[name].values())
    ratios = [d / m for q, r in timed.get(name, {}).items()
              for d, m in zip(timed["dense"][q]["ttft_s"], r["ttft_s"], strict=True)]
    cells = [name, "–" if nominal is None else f"{nominal:.2f}", f"{mean['reuse']:.3f}", f"{1 - mean['dense']:.0%}",
             f"{kl.value:.4f} ({kl.low:.4f} to {kl.high:.4f})", f"{mean['agree']:.3f}",
             f"{median(ratios):.2f}x" if ratios else "–", f"{max(r['boundary_mib'] for r in records):.1f}",
             f"{max(r['learned_mib'] for r in records):.1f}"]
    if not wide:
        return cells
    if covered is None:
        return [*cells, *["–"] * 5]
    times = f"{covered['total'] / covered['random']:.2f}x" if covered["random"] > 1e-3 else "–"
    peers = "–" if covered["peers"] is None else f"{covered['peers']:.3f}"
    return [*cells, f"{covered['budget']:.3f}", f"{covered['total']:.3f}", f"{covered['random']:.3f}", times, peers]


def pair(found: Found, first: str, second: str) -> str:
    one, two = (over_questions(found, name, "kl") for name in (first, second))
    d = paired_difference(one, two)
    return f"{first} against {second} {d.value:+.4f} ({d.low:+.4f} to {d.high:+.4f})"


def cost_table(record: dict[str, Any]) -> str:
    rows = [[c["method"], f"{c['seconds']:.2f}", f"{c['dense_seconds']:.2f}", f"{c['predicted']:.3f}",
             f"{c['measured']:.3f}", f"{c['measured'] / c['predicted'] - 1:+.0%}", f"{c['page_rounded']:.3f}"]
            for c in record["costs"]]
    head = ["method", "CPU s", "dense CPU s", "formula", "measured", "off by", "page-rounded"]
    tokens = record["costs"][0]["shared_tokens"]
    return (f"## Cost of selective recompute, {tokens} shared tokens\n\nShare of a dense prefill of the shared rows; "
            f"medians of {record['repeats']} interleaved repeats.\n\n" + markdown(head, rows))


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["teams", "evidence", "coverage", "cost", "table"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", default=",".join(("dense", *SELECTIVE, *LEARNING)), help="of a run")
    parser.add_argument("--n", type=int, default=4, help="questions of coverage")
    parser.add_argument("--timed", type=int, default=0, help="take so many questions, for TTFT alone")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where what was learned is kept")
    a = parser.parse_args()
    if a.step == "table":
        (HERE / "README.md").write_text(table())
        return
    engine = load(a.model)
    names = tuple(a.methods.split(","))
    end, n = ("-ttft.jsonl", a.timed) if a.timed else (".jsonl", QUESTIONS)
    steps = {"teams": partial(teams, engine, a.data_dir, a.runs, names, HERE / f"gsm8k{end}", n),
             "evidence": partial(evidence, engine, a.data_dir, a.runs / "evidence", names,
                                 HERE / f"hotpotqa-evidence{end}", n),
             "coverage": partial(coverage, engine, a.data_dir, a.n, names),
             "cost": partial(cost, engine, a.tokens, a.repeats)}
    steps[a.step]()


if __name__ == "__main__":
    main()
