"""The residual gate at work, hop by hop: `python docs/results/affine/gate.py --help`.

    target=X   hops on one edge with that target: is the mean divergence of what was reused below it?
    change     a topic, then a role prompt, that change on the way: how many runs until a dense hop?

Each hop is forced to the dense answer and compared with dense logits from outside: what the gate itself knows comes
from its own audits alone. Hops and the session's memory are kept in --out, and the same command goes on there.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import arguments
import torch
from study import Dense
from tasks import TASKS, Task

from kvbaton.bench.cast import branch
from kvbaton.bench.chain import divergence
from kvbaton.bench.conditions import conditions
from kvbaton.bench.result import Journal, Record, read
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.models import load
from kvbaton.engine.sampling import Force, Generate
from kvbaton.engine.session import Session
from kvbaton.gates import Residual
from kvbaton.memory import Memory
from kvbaton.recipes import recipe

Hops = list[tuple[str, Task, int]]
"""Phase, task and text of each hop."""


def changing() -> Hops:
    """Ten hops on a task, another topic in the same slot, the first again, then another role prompt."""
    old, other = TASKS["gsm8k"], TASKS["hotpotqa"]
    foreign = replace(old, name="gsm8k-roles-on-documents", max_tokens=120, texts=lambda folder: [
        {"question": text["documents"]} for text in other.texts(folder)])
    changed = replace(old, name="gsm8k-new-role", roles={**old.roles, "critic": "You praise whatever you are shown."})
    return [(phase, task, text) for phase, task, texts in (
        ("start", old, range(10)), ("topic", foreign, range(100, 106)), ("back", old, range(10, 13)),
        ("role", changed, range(13, 18))) for text in texts]


def on_edge(count: int, first: int) -> Hops:
    return [("target", TASKS["gsm8k"], text) for text in range(first, first + count)]


class Line:
    """One session, its hops measured from outside."""

    def __init__(self, engine: HFEngine, gate: Residual, args: argparse.Namespace, kept: Path) -> None:
        method = replace(recipe("hybrid"), gate=gate)
        memory = Memory.load(kept, method.corrector, engine.geometry, engine.identity) if kept.exists() else None
        self.session = Session(engine, method, memory=memory, audit=args.audit)
        self._args, self._kept, self._dense = args, kept, {}  # type: ignore[var-annotated]

    def hop(self, task: Task, text: int) -> Record:
        args = self._args
        if task.name not in self._dense:
            self._dense[task.name] = Dense(self.session.engine, task, args.data, 0)
        dense = self._dense[task.name]
        run, fills = dense.source(text)
        prompt = dense.prompt("critic", fills)
        answer = dense.hop(prompt, Generate(args.answer_tokens), run).output_ids or (0,)
        truth = dense.hop(prompt, Force(answer), run)
        hop = self.session.hop(prompt, Force(answer), branch(run, prompt))
        dense.take_pairs()
        self.session.memory.save(self._kept, self.session.engine.identity)
        decision = hop.decisions[0]
        return {"task": task.name, "text": text, "dense": hop.dense, "reason": decision.reason,
                "predicted": decision.predicted, "audited": hop.divergence, "kl": divergence(truth, hop)}


def play(scenario: str, gate: Residual, hops: Hops, engine: HFEngine, args: argparse.Namespace,
         journal: Journal) -> bool:
    """Run what is missing of a scenario; False if the time ran out."""
    missing = [(at, hop) for at, hop in enumerate(hops) if (str(at), scenario, 0) not in journal.done]
    if not missing:
        return True
    line = Line(engine, gate, args, args.out.with_suffix(f".{scenario.replace('=', '-')}.safetensors"))
    for at, (phase, task, text) in missing:
        if time.monotonic() > args.until:
            return False
        journal.append({"question": str(at), "method": scenario, "repeat": 0, "phase": phase, **line.hop(task, text)})
    return True


def summary(file: Path) -> list[str]:
    """Markdown lines: what became of each target, and when each change was noticed."""
    by_scenario: dict[str, list[Record]] = defaultdict(list)
    for record in read(file).records:
        by_scenario[record["method"]].append(record)
    lines = ["| target, nats a token | hops | dense | mean KL of reuse hops | mean KL of all hops | why dense |",
             "|---|---|---|---|---|---|"]
    for scenario, rows in by_scenario.items():
        if scenario.startswith("target="):
            reuse = [row["kl"] for row in rows if not row["dense"]]
            why = ", ".join(f"{reason} {n}" for reason, n in Counter(r["reason"] for r in rows if r["dense"]).items())
            mean = f"{sum(reuse) / len(reuse):.5f}" if reuse else "-"
            lines.append(f"| {scenario[7:]} | {len(rows)} | {len(rows) - len(reuse)} | {mean} | "
                         f"{sum(reuse) / len(rows):.5f} | {why} |")
    lines += ["", "| phase | hops, D dense, r reuse | reasons |", "|---|---|---|"]
    phases: dict[str, list[Record]] = defaultdict(list)
    for row in by_scenario.get("change", []):
        phases[row["phase"]].append(row)
    for phase, rows in phases.items():
        lines.append(f"| {phase} | {''.join('D' if row['dense'] else 'r' for row in rows)} | "
                     f"{', '.join(dict.fromkeys(row['reason'] for row in rows if row['dense']))} |")
    return lines


def main() -> int:
    parser = arguments.parser(__doc__, first=100, answer_tokens=25)
    parser.add_argument("--targets", type=float, nargs="*", default=[0.012, 0.03])
    parser.add_argument("--hops", type=int, default=60)
    parser.add_argument("--only", choices=("change", "target"), help="leave out the other kind of scenario")
    parser.add_argument("--audit", type=float, default=0.1)
    args = parser.parse_args()
    args.until = time.monotonic() + args.seconds
    engine = load(args.model, dtype=args.dtype)
    identity = {"study": "gate", "model": args.model, "dtype": args.dtype, "hops": args.hops, "first": args.first,
                "audit": args.audit, "answer_tokens": args.answer_tokens}
    scenarios = {"change": (Residual(), changing())} | {
        f"target={target}": (Residual(target=target), on_edge(args.hops, args.first)) for target in args.targets}
    wanted = [name for name in scenarios if name.startswith(args.only or "")]
    with Journal.open(args.out, identity, conditions()) as journal:
        done = all(play(name, *scenarios[name], engine, args, journal) for name in wanted)
    print("\n".join(summary(args.out)))
    return 0 if done else 75


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    raise SystemExit(main())
