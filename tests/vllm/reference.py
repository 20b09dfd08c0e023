"""Replays scenarios on the other engine, in its own environment: ``python reference.py MODEL IN.json OUT.pt``.

The answers that vLLM gave are forced. Writes, for every scenario, run and hop, the logits ``[m, vocab]`` of the answer
and the rows that were computed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

import extra_recipes
from scenario import Scenario

from kvbaton.engine.hf import HFEngine
from kvbaton.engine.sampling import Force
from kvbaton.engine.session import Session
from kvbaton.prompt import Prompt, Segment
from kvbaton.recipes import recipe


def replay(engine: HFEngine, scenario: Scenario) -> list[list[dict]]:
    out = []
    with Session(engine, recipe(scenario.method), prefix_cache=False) as session:
        for hops in scenario.runs:
            store, answers, results = session.start_run(), {}, []
            for hop in hops:
                parts = tuple(Segment(tuple(ids), share) for ids, share in hop.filled(answers))
                result = session.hop(Prompt(hop.reader, parts), Force(tuple(hop.answer)), store, writes=hop.reader)
                answers[hop.reader] = hop.answer
                results.append({"logits": result.logits, "reasons": [d.reason for d in result.decisions],
                                "actions": [d.action for d in result.decisions]})
            out.append(results)
    return out


if __name__ == "__main__":
    model_path, source, target = sys.argv[1:]
    extra_recipes.add()
    engine = HFEngine(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32))
    scenarios = [Scenario.from_dict(raw) for raw in json.loads(Path(source).read_text())]
    torch.save([replay(engine, scenario) for scenario in scenarios], target)
