"""What the correction costs: `python docs/results/affine/cost.py --help`. One JSON line a length, on stdout.

    ttft     of a reuse hop, by method, beside a dense hop of the same prompt; methods interleaved, medians
    apply    the correction of every layer alone, as a share of the dense prefill
    learn    learning from a dense hop, mean over the first of an edge (solving included), as a share of that hop
    bytes    of the state on the hot path, measured here and by formula for another model's shape
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict

import torch

from kvbaton.bench.cast import branch
from kvbaton.bench.conditions import conditions
from kvbaton.correctors.affine import Affine
from kvbaton.correctors.affine_state import AffineState
from kvbaton.engine.models import load
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Generate
from kvbaton.engine.session import Session
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Place, Prompt, Segment
from kvbaton.recipes import recipe
from kvbaton.references import RunStore

LESSONS = 3
ANSWER = 32
PRIVATE = 100
"""Own tokens behind the shared text."""


class Bench:
    """One shared length: sessions of every method that have learned ``LESSONS`` texts of it."""

    def __init__(self, engine_name: str, dtype: str, tokens: int, methods: list[str]) -> None:
        self.engine, self.tokens = load(engine_name, dtype=dtype), tokens
        self.sessions = {name: Session(self.engine, recipe(name)) for name in methods}
        self._writer = Session(self.engine, recipe("full-shared"))
        self._held: dict[int, RunStore] = {}
        self.learn_s: list[float] = []
        self.learn_hop_s: list[float] = []

    def text(self, seed: int) -> Segment:
        words = random.Random(seed)
        return Segment(tuple(words.randrange(100, 40000) for _ in range(self.tokens)), "text")

    def prompt(self, reader: str, head: int, seed: int) -> Prompt:
        own = tuple(range(1000, 1000 + head)), tuple(range(2000, 2000 + PRIVATE))
        return Prompt(reader, (Segment(own[0]), self.text(seed), Segment(own[1])))

    def run(self, session: Session, seed: int, answer: int = 1) -> HopResult:
        """The reader's hop behind a source hop, which is the same for every method and done once."""
        if seed not in self._held:
            self._held = {seed: self._writer.start_run()}
            self._writer.hop(self.prompt("source", 60, seed), Generate(1), self._held[seed])
        prompt = self.prompt("reader", 80, seed)
        return session.hop(prompt, Generate(answer), branch(self._held[seed], prompt))

    def teach(self) -> None:
        for seed in range(LESSONS):
            for name, session in self.sessions.items():
                if seed and not session.recipe.corrector.learns:
                    continue
                hop = self.run(session, seed, ANSWER if name == "affine" else 1)
                if name == "affine" and hop.dense:
                    self.learn_s.append(hop.learn_s)
                    self.learn_hop_s.append(hop.token_times_s[-1])

    def ttft(self, repeats: int) -> dict[str, float]:
        times = defaultdict(list)
        for repeat in range(repeats):
            for name, session in self.sessions.items():
                hop = self.run(session, 100 + repeat)
                if name != "dense" and hop.dense:
                    raise SystemExit(f"{name} ran dense: {hop.decisions}")
                times[name].append(hop.ttft_s)
        return {name: statistics.median(values) for name, values in times.items()}

    def apply_s(self, repeats: int) -> float:
        """Seconds to correct a segment, all layers, and nothing else."""
        session = self.sessions["affine"]
        state = session.memory.state(session.memory.edges()[0])
        assert isinstance(state, AffineState)
        geometry = self.engine.geometry
        k = torch.randn(geometry.layers, geometry.kv_heads, self.tokens, geometry.head_dim).to(geometry.dtype)
        source, took = KV(k, k.clone(), 60, "source", True), []
        for _ in range(repeats):
            begin = time.perf_counter()
            layer = session.recipe.corrector.correct(state, source, Place(80, self.tokens))
            for at in range(geometry.layers):
                layer(at)
            took.append(time.perf_counter() - begin)
        return statistics.median(took)


def hot_bytes(shape: Geometry, tokens: int = 8) -> int:
    """Measured on a state of that shape: it learns one short random text."""
    rule = Affine()
    state = rule.new_state(shape)
    parts = [torch.randn(shape.layers, shape.kv_heads, tokens, shape.head_dim).to(shape.dtype) for _ in range(4)]
    rule.learn(state, KV(parts[0], parts[1], 9, "source", True), KV(parts[2], parts[3], 5, "reader", True))
    return state.hot_nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 6144])
    parser.add_argument("--methods", nargs="+", default=["dense", "full-shared", "affine", "hybrid"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for tokens in args.tokens:
        bench = Bench(args.model, args.dtype, tokens, args.methods)
        bench.teach()
        ttft = bench.ttft(args.repeats)
        apply_s = bench.apply_s(args.repeats)
        print(json.dumps({
            "tokens": tokens, "model": args.model, "dtype": args.dtype, "ttft_s": ttft, "apply_s": apply_s,
            "apply_over_dense": apply_s / ttft["dense"], "learn_s": bench.learn_s, "learn_hop_s": bench.learn_hop_s,
            "learn_over_hop": sum(bench.learn_s) / max(sum(bench.learn_hop_s), 1e-9),
            "hot_bytes_llama_3_1_8b": hot_bytes(Geometry(32, 8, 128, torch.bfloat16)), "conditions": conditions()}),
            flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
