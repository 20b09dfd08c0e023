"""What every study script here is told: model, texts, where the data lie, when to stop, where results go."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser(doc: str, first: int, answer_tokens: int) -> argparse.ArgumentParser:
    """The arguments that all have; ``first`` and ``answer_tokens`` are the script's own defaults."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--model", default="smollm2")
    made.add_argument("--dtype", default="float32")
    made.add_argument("--first", type=int, default=first, help="first text that is scored")
    made.add_argument("--answer-tokens", type=int, default=answer_tokens)
    made.add_argument("--data", type=Path, default=Path("shared/data"), help="folder with NAME*.jsonl; else packages")
    made.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long, to be resumed")
    made.add_argument("--out", type=Path, required=True)
    return made


def keeps_lessons(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse, for a script that keeps what was taught, in a folder that is there afterwards."""
    made.add_argument("--lessons", type=Path, help="folder that keeps what was taught (default: beside --out)")
    args = made.parse_args()
    args.lessons = args.lessons or args.out.with_suffix(".lessons")
    args.lessons.mkdir(parents=True, exist_ok=True)
    return args
