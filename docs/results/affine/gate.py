"""The residual gate at work: `python docs/results/affine/gate.py --help`. One JSON line a hop, then one a scenario.

    target   60 hops on one edge at each target: is the mean divergence, reuse hops alone and all hops, below it?
    change   a topic and a role prompt that change on the way: how many runs until a dense hop?

Each hop is forced to the dense answer and compared with dense logits, outside the session: what the session itself
knows comes from its own audits alone.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from study import Dense
from tasks import TASKS, Task

from kvbaton.bench.cast import branch
from kvbaton.bench.chain import divergence
from kvbaton.bench.conditions import conditions
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.models import load
from kvbaton.engine.sampling import Force, Generate
from kvbaton.engine.session import Session
from kvbaton.gates import Residual
from kvbaton.recipes import recipe


class Line:
    """Hops of one session on the texts of tasks, measured from outside."""

    def __init__(self, engine: HFEngine, folder: Path, gate: Residual, audit: float, answer_tokens: int,
                 dense: dict[str, Dense]) -> None:
        self.session = Session(engine, replace(recipe("hybrid"), gate=gate), audit=audit)
        self._engine, self._folder, self._answer, self._dense = engine, folder, answer_tokens, dense

    def hop(self, task: Task, reader: str, text: int) -> dict[str, object]:
        dense = self._dense.get(task.name) or Dense(self._engine, task, self._folder, 72)
        self._dense[task.name] = dense
        run, fills = dense.source(text)
        prompt = dense.prompt(reader, fills)
        answer = dense.hop(prompt, Generate(self._answer), run).output_ids or (0,)
        truth = dense.hop(prompt, Force(answer), run)
        hop = self.session.hop(prompt, Force(answer), branch(run, prompt))
        dense.take_pairs()
        decision = hop.decisions[0]
        return {"task": task.name, "reader": reader, "text": text, "dense": hop.dense, "reason": decision.reason,
                "predicted": decision.predicted, "audited": hop.divergence, "kl": divergence(truth, hop)}


def say(**row: object) -> None:
    print(json.dumps(row), flush=True)


def targets(args: argparse.Namespace, engine: HFEngine, known: dict[str, Dense]) -> None:
    task = TASKS[args.task]
    for target in args.targets:
        line = Line(engine, args.data, Residual(target=target), args.audit, args.answer_tokens, known)
        rows = []
        for text in range(args.first, args.first + args.hops):
            rows.append(line.hop(task, task.readers[0], text))
            say(scenario="target", target=target, **rows[-1])
        reuse = [float(str(row["kl"])) for row in rows if not row["dense"]]
        say(scenario="target", target=target, hops=len(rows), reuse_hops=len(reuse),
            mean_all=sum(reuse) / len(rows), mean_reuse=sum(reuse) / len(reuse) if reuse else None,
            conditions=conditions())


def changes(args: argparse.Namespace, engine: HFEngine, known: dict[str, Dense]) -> None:
    """Ten hops on a task, then another topic in the same slot, then another role prompt."""
    old, other = TASKS["gsm8k"], TASKS["hotpotqa"]
    foreign = replace(old, name="gsm8k-roles-on-documents", texts=lambda folder: [
        {"question": text["documents"]} for text in other.texts(folder)])
    changed = replace(old, name="gsm8k-new-role", roles={**old.roles, "critic": "You praise whatever you are shown."})
    line = Line(engine, args.data, Residual(), 0.0, args.answer_tokens, known)
    for phase, task, texts in (("start", old, range(10)), ("topic", foreign, range(100, 108)),
                               ("back", old, range(10, 14)), ("role", changed, range(14, 20))):
        dense = []
        for text in texts:
            row = line.hop(task, "critic", text)
            dense.append(bool(row["dense"]))
            say(scenario="change", phase=phase, **row)
        say(scenario="change", phase=phase, dense=dense, first_dense=dense.index(True) + 1 if any(dense) else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--task", default="gsm8k", choices=sorted(TASKS))
    parser.add_argument("--targets", type=float, nargs="*", default=[0.004, 0.012])
    parser.add_argument("--hops", type=int, default=60)
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--audit", type=float, default=0.1)
    parser.add_argument("--answer-tokens", type=int, default=25)
    parser.add_argument("--no-changes", action="store_true")
    parser.add_argument("--data", type=Path, default=Path("shared/data"))
    args = parser.parse_args()
    engine, known = load(args.model, dtype=args.dtype), {}
    if not args.no_changes:
        changes(args, engine, known)
    targets(args, engine, known)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
