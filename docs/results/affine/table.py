"""Tables from the study's JSONL files, as Markdown: `python docs/results/affine/table.py rows/*.jsonl`."""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from kvbaton.bench.result import RunFile, read
from kvbaton.bench.stats import Interval, mean_interval, median, paired_difference, ratio_of_means

BASE = "full-shared"


def scores(run: RunFile) -> dict[str, dict[str, dict[str, float]]]:
    """``scores[method][text]``: the record's numbers."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for record in run.records:
        found[record["method"]][record["question"]] = record
    return found


def both(one: dict[str, dict[str, float]], two: dict[str, dict[str, float]]) -> tuple[list[float], list[float]]:
    """Divergences of two methods on the texts that both were scored on."""
    common = sorted(set(one) & set(two))
    return [one[text]["kl"] for text in common], [two[text]["kl"] for text in common]


def _range(interval: Interval, digits: int) -> str:
    return f"{interval.value:.{digits}f} ({interval.low:.{digits}f} to {interval.high:.{digits}f})"


def table(run: RunFile) -> list[str]:
    """One line a method: divergence, what is recovered of full-shared's, texts made worse, rows reused."""
    by_method = scores(run)
    readers = {question.split("/")[1] for question in by_method[BASE]}
    identity = run.identity
    title = f"**{identity['model']}, {identity['dtype']}, {identity['task']}**"
    head = ("method", "texts", "KL, nats a token", "median", "recovered (95 %)", "paired to full-shared (95 %)",
            "worse", "top-1", "rows reused")
    lines = [f"{title}: unseen texts, {len(readers)} edges, {identity['answer_tokens']} answer tokens.", "",
             f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for method, rows in by_method.items():
        kl, base = both(rows, by_method[BASE])
        recovered = ratio_of_means(kl, base)
        kept = Interval(1 - recovered.value, 1 - recovered.high, 1 - recovered.low, recovered.n)
        worse = sum(k > b for k, b in zip(kl, base, strict=True))
        agree = mean_interval([row["agree"] for row in rows.values()]).value
        reuse = mean_interval([row["reuse"] for row in rows.values()]).value
        own = method == BASE
        lines.append(f"| {method} | {len(kl)} | {mean_interval(kl).value:.5f} | {median(kl):.5f} | "
                     f"{'-' if own else _range(kept, 2)} | {'-' if own else _range(paired_difference(kl, base), 5)} | "
                     f"{'-' if own else f'{worse}/{len(kl)}'} | {agree:.3f} | {reuse:.2f} |")
    return lines


def duels(run: RunFile, pairs: list[tuple[str, str]]) -> list[str]:
    """Paired differences between two methods, where both were scored."""
    by_method = scores(run)
    lines = []
    for one, two in pairs:
        if one in by_method and two in by_method:
            difference = paired_difference(*both(by_method[one], by_method[two]))
            verdict = "lower" if difference.high < 0 else "higher" if difference.low > 0 else "not told apart"
            lines.append(f"- {one} minus {two}, {difference.n} texts: {_range(difference, 5)}, {verdict}")
    return lines


def edges(run: RunFile) -> list[str]:
    """Mean divergence by edge after few texts, beside full-shared: is it ever worse?"""
    by_method = scores(run)
    few = [method for method in by_method if method.partition("@")[2] in ("1", "2", "3")]
    readers = sorted({question.split("/")[1] for question in by_method[BASE]})
    lines = [f"| edge to | {BASE} | {' | '.join(few)} |", "|---" * (len(few) + 2) + "|"] if few else []
    for reader in readers if few else []:
        means = [mean_interval([row["kl"] for question, row in by_method[method].items()
                                if question.split("/")[1] == reader and question in by_method[few[0]]]).value
                 for method in (BASE, *few)]
        lines.append(f"| {reader} | {' | '.join(f'{mean:.5f}' for mean in means)} |")
    return lines


DUELS = [
    ("affine@10", "kvcmas@10"), ("affine@10", "kvcmas+4@10"), ("affine@10", "shift@10"), ("hybrid@10", "first"),
    ("hybrid@10", "affine@10"), ("hybrid@10", "kvcmas+4@10"), ("hybrid@10", "cacheblend"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        run = read(file)
        print("\n".join([*table(run), "", *duels(run, DUELS), "", *edges(run), ""]))


if __name__ == "__main__":
    main()
