"""What a target can promise: `gate_odds.py rows/FILE.jsonl METHOD` plays the gate's rule on recorded divergences.

Texts are drawn with replacement from the divergences that METHOD had in a study; errors are taken as constant, so that
only the rule about measured divergence is at work. No model runs: thousands of runs of 60 hops in a second.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from statistics import mean

from kvbaton.bench.result import read
from kvbaton.correctors.record import Record


def run(divergences: list[float], target: float, hops: int, audit: float, seed: int) -> list[float | None]:
    """Divergence of each hop, None where it went dense."""
    rng, record, out = random.Random(seed), Record(), []
    for _ in range(hops):
        would_be, predicted = rng.choice(divergences), record.predicted
        dense = predicted is None or predicted > target
        if dense or rng.random() < audit:
            record.latest = 1.0
            record.audited_once(would_be)
        out.append(None if dense else would_be)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("method")
    parser.add_argument("--targets", type=float, nargs="+", default=[0.03, 0.02, 0.012, 0.01, 0.008, 0.006])
    parser.add_argument("--hops", type=int, default=60)
    parser.add_argument("--audit", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=2000)
    args = parser.parse_args()
    found = [record["kl"] for record in read(args.file).records if record["method"] == args.method]
    print(f"{len(found)} texts, mean {mean(found):.4f} nats a token\n\n| target | dense hops | mean KL of all hops | "
          "runs above target | mean KL of reuse hops |\n|---|---|---|---|---|")
    for target in args.targets:
        runs = [run(found, target, args.hops, args.audit, seed) for seed in range(args.runs)]
        means = [sum(kl or 0.0 for kl in hops) / args.hops for hops in runs]
        reused = [kl for hops in runs for kl in hops if kl is not None]
        dense = mean(hops.count(None) for hops in runs)
        print(f"| {target} | {dense:.1f} of {args.hops} | {mean(means):.4f} | "
              f"{mean(value > target for value in means):.3f} | {mean(reused) if reused else 0:.4f} |")


if __name__ == "__main__":
    main()
