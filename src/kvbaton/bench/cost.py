"""What selective recompute costs: measured first-token times beside the formulas, in one interleaved run.

    FLOPs of m rows that see c keys each, a layer   2 m x weights + 4 m c x query width
    predicted share   (FLOPs of the method - FLOPs of full reuse) / (FLOPs of dense - FLOPs of full reuse)
    measured share    the same of times, first token and one row after it
    page-rounded      a page of 16 tokens counts as computed if any row of it is chosen: the charge of paged simulations

Taking full reuse off both leaves the price of the shared rows alone, without private text, moving keys or the head.
On a CPU with one thread the price is taken in processor seconds, which other jobs on the machine do not lengthen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvbaton.bench.cast import branch
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Generate
from kvbaton.engine.session import Session
from kvbaton.errors import UsageError
from kvbaton.prompt import Prompt, Segment
from kvbaton.recipes import Recipe, recipe

PAGE_TOKENS = 16


@dataclass(frozen=True)
class Cost:
    """One method at one length. Shares are of a dense prefill of the shared rows; ``seconds`` are medians."""

    method: str
    shared_tokens: int
    rows_per_layer: tuple[int, ...]
    seconds: float
    dense_seconds: float
    predicted: float
    measured: float
    page_rounded: float


def shared_flops(engine: HFEngine, rows_per_layer: Sequence[int], keys: float) -> float:
    """FLOPs of reused rows computed afresh, ``rows_per_layer`` of them, each seeing ``keys`` keys on average."""
    config = engine.model.config.get_text_config()
    width = config.num_attention_heads * engine.geometry.head_dim
    weights = [sum(p.numel() for p in layer.parameters() if p.ndim == 2) for layer in engine.layers]
    return float(sum(rows * (2 * w + 4 * keys * width) for rows, w in zip(rows_per_layer, weights, strict=True)))


def selective_cost(engine: HFEngine, methods: Sequence[Recipe], tokens: int, repeats: int = 3,
                   seed: int = 0) -> list[Cost]:
    """Time ``methods`` on one shared text of ``tokens`` random ids behind two role prompts of 32, interleaved."""
    if repeats < 1 or tokens < PAGE_TOKENS:
        raise UsageError(f"want at least 1 repeat and {PAGE_TOKENS} tokens, got {repeats} and {tokens}")
    source, reader = _prompts(engine, tokens, seed)
    every = [recipe("dense"), recipe("full-shared"), *methods]
    sessions = [Session(engine, method) for method in every]
    times: list[list[float]] = [[] for _ in every]
    last: list[HopResult] = []
    held = sessions[1].start_run()
    sessions[1].hop(source, Generate(1), held)
    runs = []
    for session in sessions:
        run = branch(held, reader)
        if session.recipe.selector.entry is not None or session.recipe.reference.encodes_alone:
            run.clear()
            session.hop(source, Generate(1), run)
        runs.append(run)
    alone = engine.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    for _ in range(repeats):
        last = []
        for session, run, taken in zip(sessions, runs, times, strict=True):
            begin = clock()
            last.append(session.hop(reader, Generate(1), run))
            taken.append(clock() - begin)
    for session in sessions:
        session.close()
    dense_s, reuse_s, *others = (statistics.median(taken) for taken in times)
    keys = len(reader.segments[0]) + tokens / 2
    whole = shared_flops(engine, [tokens] * engine.geometry.layers, keys)
    return [Cost(method.name, tokens, result.rows_per_layer, seconds, dense_s,
                 shared_flops(engine, result.rows_per_layer, keys) / whole,
                 (seconds - reuse_s) / (dense_s - reuse_s), _page_rounded(result.rows_per_layer, tokens))
            for method, result, seconds in zip(methods, last[2:], others, strict=True)]


def _prompts(engine: HFEngine, tokens: int, seed: int) -> tuple[Prompt, Prompt]:
    generator, config = torch.Generator().manual_seed(seed), engine.model.config.get_text_config()

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, config.vocab_size, (count,), generator=generator).tolist())

    text = Segment(ids(tokens), "text")
    source, reader = (Prompt(name, (Segment(ids(32)), text, Segment(ids(16)))) for name in ("source", "reader"))
    return source, reader


def _page_rounded(rows_per_layer: Sequence[int], tokens: int) -> float:
    """Share of rows charged if pages are computed whole and rows are chosen at random."""
    shares = [rows / tokens for rows in rows_per_layer]
    return sum(1.0 - (1.0 - share) ** PAGE_TOKENS for share in shares) / len(shares)
