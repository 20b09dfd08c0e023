"""The field in one table: every published method on the same prompts, model and pass.

    python docs/results/field/study.py eval TASK          fidelity and TTFT, every method interleaved in one process
    python docs/results/field/study.py coverage TASK      KV error removed, beside random rows at the same budget
    python docs/results/field/study.py cost               price of selective recompute at 4,096 tokens
    python docs/results/field/study.py table              README.md from everything that is there

Results lie beside this file; the full records of `eval` lie in --runs. `eval` and `coverage` go on where they stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvbaton.bench import data
from kvbaton.bench.accounting import nominal_reuse
from kvbaton.bench.conditions import conditions
from kvbaton.bench.cost import selective_cost
from kvbaton.bench.coverage import Ruler
from kvbaton.bench.measures import Fidelity
from kvbaton.bench.profile import calibration
from kvbaton.bench.result import read
from kvbaton.bench.runner import Evaluation, Runner
from kvbaton.bench.stats import mean_interval, paired_difference
from kvbaton.bench.summary import Summary, handed, mean_over_hops, per_question, scored, summarise
from kvbaton.bench.tasks import task
from kvbaton.engine.models import load
from kvbaton.overrides import override
from kvbaton.recipes import Recipe, recipe

HERE = Path(__file__).parent
TASKS = ("gsm8k", "hotpotqa-evidence")
METHODS = ("full-shared", "droidspeak", "cacheblend", "cacheblend-bottomright", "relaycaching", "epic", "prophetkv",
           "graphflow", "graphflow-bare", "kvcomm", "kvcomm-open", "kvcomm-upstream-open", "kvcmas", "random-matched")
VARIANTS = {
    # CacheBlend's effective budget at 15 % on 30 layers: (2 + 0.15 x 28) / 30.
    "random-matched": ("random", "selector.share=0.207"),
    # With the gate open, so that both forms of offset are seen on every text that some message is as long as.
    "kvcomm-open": ("kvcomm", "gate.gamma=1"), "kvcomm-upstream-open": ("kvcomm-upstream", "gate.gamma=1"),
}
KEPT = ("kl", "agree", "reuse", "ttft_s")
PAIRS = (("cacheblend", "random-matched"), ("cacheblend", "cacheblend-bottomright"), ("kvcomm-open", "kvcomm-upstream-open"))
"""Comparisons that were expected to favour the first."""


def method(name: str) -> Recipe:
    """A recipe, or a variant of one under its own name."""
    if name not in VARIANTS:
        return recipe(name)
    base, setting = VARIANTS[name]
    return replace(override(recipe(base), setting), name=name)


def evaluate(name: str, model: str, n: int, learn: int, folder: Path | None, out: Path) -> None:
    spec = Evaluation(task(name), tuple(method(m) for m in ("dense", *METHODS)), n, learn, seed=0, repeats=1,
                      answer_tokens=32 if name == "gsm8k" else 24, measure=Fidelity())
    loaded = data.load(spec.task.data_set, None, folder)
    began = time.monotonic()
    Runner(load(model), spec, loaded, out, lambda done, total, what: print(
        f"{time.monotonic() - began:.0f} s: {done}/{total} {what}", flush=True)).run()


def coverage(name: str, model: str, n: int, learn: int, folder: Path | None, out: Path) -> None:
    """Append one JSON line a method that is not there yet."""
    done = {json.loads(line)["method"] for line in out.read_text().splitlines()} if out.exists() else set()
    chosen, engine = task(name), load(model)
    taught, rows = data.split(data.load(chosen.data_set, None, folder).rows, learn, n, seed=0)
    lessons = calibration(engine, chosen, taught, 32)
    chains = calibration(engine, chosen, rows, 32)
    whole, peers = Ruler(engine, chains), None
    if name == "gsm8k":
        peers = Ruler(engine, chains, frozenset(agent.name for agent in chosen.agents()))
    for each in (m for m in METHODS if m not in done):
        taught_by = lessons if method(each).corrector.learns else ()
        found = whole.coverage(method(each), taught_by)
        with out.open("a") as file:
            line = {"task": name, "method": each, "n": n, "learn": learn, **asdict(found),
                    "peers": round(peers.coverage(method(each), taught_by).total, 4) if peers and taught_by else None,
                    "layers": [round(x, 4) for x in found.layers]}
            file.write(json.dumps(line) + "\n")
        print(each, f"{found.total:.3f} at budget {found.budget:.3f}, random {found.random:.3f}", flush=True)


def cost(model: str, tokens: int, repeats: int, out: Path) -> None:
    engine = load(model)
    chosen = [override(recipe(name), "selector.share=0.1") for name in ("cacheblend", "random")]
    found = selective_cost(engine, [*chosen, recipe("droidspeak")], tokens, repeats)
    record = {"conditions": conditions(str(engine.device)), "repeats": repeats, "costs": [asdict(c) for c in found]}
    out.write_text(json.dumps(record, indent=1, default=str) + "\n")
    for c in found:
        print(c.method, f"predicted {c.predicted:.3f} measured {c.measured:.3f} page-rounded {c.page_rounded:.3f}")


def compact(source: Path, out: Path) -> None:
    """The results of an eval, one short line a question and method."""
    lines = []
    for name, questions in scored(read(source)).items():
        for question, records in sorted(questions.items()):
            hops = [hop for record in records for hop in handed(record)]
            lines.append({"method": name, "question": question,
                          **{key: [round(float(hop[key]), 6) for hop in hops] for key in KEPT},
                          "dense": [bool(hop["dense"]) for hop in hops]})
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))


def table(runs: Path) -> str:
    """The README beside this file."""
    parts = [(HERE / "head.md").read_text().rstrip()]
    for name in TASKS:
        source = runs / f"field-{name}.jsonl"
        if not source.exists():
            continue
        found = read(source)
        compact(source, HERE / f"{name}.jsonl")
        covered = {line["method"]: line for line in map(json.loads, _lines(HERE / f"coverage-{name}.jsonl"))}
        rows = [_row(s, covered.get(s.method)) for s in summarise(found)]
        n = max(s.questions for s in summarise(found))
        parts.append(f"## {name}, {n} questions\n\n{_conditions(found.identity)}\n\n" + _markdown(
            ["method", "nominal reuse", "effective reuse", "dense hops", "KL to dense (95 %)", "top-1 agreement",
             "speed-up of TTFT", "budget", "coverage", "random", "times random"], rows))
        parts.append("Expected differences in KL, first minus second, paired over questions (95 %): "
                     + "; ".join(_pair(found, *pair) for pair in PAIRS) + ".")
    if (HERE / "cost.json").exists():
        parts.append(_cost_table(json.loads((HERE / "cost.json").read_text())))
    if (HERE / "findings.md").exists():
        parts.append((HERE / "findings.md").read_text().rstrip())
    return "\n\n".join(parts) + "\n"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _row(s: Summary, covered: dict[str, Any] | None) -> list[str]:
    nominal = nominal_reuse(method(s.method), 30)
    cells = [s.method, "–" if nominal is None else f"{nominal:.2f}", f"{s.reuse:.3f}", f"{s.gate_dense:.0%}",
             "–" if s.kl is None else f"{s.kl.value:.4f} ({s.kl.low:.4f} to {s.kl.high:.4f})",
             "–" if s.agree is None else f"{s.agree.value:.3f}", f"{s.speed_up:.2f}x"]
    if covered is None:
        return [*cells, "–", "–", "–", "–"]
    times = f"{covered['total'] / covered['random']:.2f}x" if covered["random"] > 1e-9 else "–"
    return [*cells, f"{covered['budget']:.3f}", f"{covered['total']:.3f}", f"{covered['random']:.3f}", times]


def _pair(found: Any, first: str, second: str) -> str:
    table_of = scored(found)
    if first not in table_of or second not in table_of:
        return f"{first} against {second}: not measured"
    one, two = (per_question(table_of[name], mean_over_hops("kl")) for name in (first, second))
    d = paired_difference(one, two)
    means = f"{mean_interval(one).value:.4f} against {mean_interval(two).value:.4f}"
    return f"{first} against {second}: {d.value:+.4f} ({d.low:+.4f} to {d.high:+.4f}; {means})"


def _conditions(identity: Any) -> str:
    return (f"Model {identity['model']} ({identity['dtype']}), {identity['learn']} other questions learned from, dense "
            f"answers of at most {identity['answer_tokens']} tokens, seed {identity['seed']}.")


def _cost_table(record: dict[str, Any]) -> str:
    rows = [[c["method"], f"{c['ttft_s']:.2f}", f"{c['dense_s']:.2f}", f"{c['predicted']:.3f}", f"{c['measured']:.3f}",
             f"{c['measured'] / c['predicted'] - 1:+.0%}", f"{c['page_rounded']:.3f}"] for c in record["costs"]]
    tokens = record["costs"][0]["shared_tokens"]
    head = ["method", "TTFT s", "dense TTFT s", "formula", "measured", "off by", "page-rounded"]
    return (f"## Cost of selective recompute, {tokens} shared tokens\n\nShare of a dense prefill of the shared rows; "
            f"medians of {record['repeats']} interleaved repeats.\n\n" + _markdown(head, rows))


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["eval", "coverage", "cost", "table"])
    parser.add_argument("task", nargs="?", default="gsm8k", choices=TASKS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--n", type=int, default=None, help="questions; default 20 to evaluate, 6 for coverage")
    parser.add_argument("--learn", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    a = parser.parse_args()
    if a.step == "eval":
        a.runs.mkdir(parents=True, exist_ok=True)
        evaluate(a.task, a.model, a.n or 20, a.learn, a.data_dir, a.runs / f"field-{a.task}.jsonl")
    elif a.step == "coverage":
        coverage(a.task, a.model, a.n or 6, a.learn, a.data_dir, HERE / f"coverage-{a.task}.jsonl")
    elif a.step == "cost":
        cost(a.model, a.tokens, a.repeats, HERE / "cost.json")
    else:
        (HERE / "README.md").write_text(table(a.runs))


if __name__ == "__main__":
    main()
