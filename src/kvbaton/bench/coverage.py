"""Coverage: the share of full-shared KV error that a method removes, layer by layer, beside random rows.

The measure of the KVCMAS paper's Table 2: squared error of keys and values against a dense prefill, over the shared
text of the hops that reuse, divided by the error of position-aligned reuse. Layer 0 is exact in every method and left
out. Random rows at p of the budget remove about p of the error, so a selection is worth what it removes above that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from kvbaton.bench.chain import Chain, replay
from kvbaton.correctors.base import NoCorrection
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.session import Session
from kvbaton.errors import DataError
from kvbaton.kv import KV
from kvbaton.prompt import Segment
from kvbaton.recipes import Recipe, recipe
from kvbaton.references import Keep, Reference, RunStore
from kvbaton.selectors.random import RandomRows

Held: TypeAlias = dict[tuple[str, str, tuple[int, ...]], KV]
"""What readers hold of shared texts, by reader, share and ids."""


@dataclass(frozen=True)
class Coverage:
    """Share of error removed: ``layers`` ``[L-1]`` for layers 1 and up, ``total`` over all of them.

    ``budget``: share of shared entries recomputed; ``random``: the same of random rows at that budget.
    """

    total: float
    layers: tuple[float, ...]
    budget: float
    random: float

    @property
    def times_random(self) -> float | None:
        """How many times better than random rows; None where random rows remove nothing."""
        return self.total / self.random if self.random > 0 else None


@dataclass(frozen=True)
class Recording:
    """A reference that does what ``inner`` does and notes what every reader holds."""

    inner: Reference
    held: Held = field(default_factory=dict, compare=False)

    @property
    def encodes_alone(self) -> bool:
        return self.inner.encodes_alone

    @property
    def lead_tokens(self) -> int:
        return self.inner.lead_tokens

    @property
    def keeps(self) -> frozenset[Keep]:
        return frozenset(Keep)

    @property
    def absent(self) -> str:
        return self.inner.absent

    def resolve(self, segment: Segment, run: RunStore) -> KV | None:
        return self.inner.resolve(segment, run)

    def encoded(self, segment: Segment, alone: KV, run: RunStore) -> None:
        self.inner.encoded(segment, alone, run)

    def read(self, segment: Segment, held: KV, run: RunStore) -> None:
        self.held[held.source, segment.share or "", segment.token_ids] = held
        if (Keep.EXACT_READS if held.exact else Keep.REUSED_READS) in self.inner.keeps:
            self.inner.read(segment, held, run)

    def wrote(self, segment: Segment, held: KV, run: RunStore) -> None:
        if Keep.WRITTEN in self.inner.keeps:
            self.inner.wrote(segment, held, run)


def coverage(engine: HFEngine, method: Recipe, chains: Sequence[Chain], learn_from: Iterable[Chain] = (),
             seed: int = 0) -> Coverage:
    """Coverage of ``method`` on ``chains``, after it learned from ``learn_from``."""
    removed, total, budget = _errors(engine, method, chains, learn_from)
    random = replace(recipe("full-shared"), name="random", selector=RandomRows(min(1.0, budget), seed))
    random_left, _, _ = _errors(engine, random, chains, ())
    share = 1.0 - removed / total
    return Coverage(float(1.0 - removed.sum() / total.sum()), tuple(share.tolist()), budget,
                    float(1.0 - random_left.sum() / total.sum()))


def _errors(engine: HFEngine, method: Recipe, chains: Sequence[Chain],
            learn_from: Iterable[Chain]) -> tuple[Tensor, Tensor, float]:
    """Squared error left by ``method`` and by full-shared, each ``[L-1]``, and the share of entries recomputed."""
    recording = Recording(method.reference)
    left = full = torch.zeros(engine.geometry.layers - 1, dtype=torch.float64)
    recomputed = entries = 0
    with Session(engine, replace(method, reference=recording)) as session:
        for chain in learn_from:
            replay(session, chain)
        for chain in chains:
            truth, plain = _held(engine, recipe("dense"), chain), _held(engine, recipe("full-shared"), chain)
            recording.held.clear()
            results = replay(session, chain)
            for key, reused in plain.items():
                if not reused.exact:
                    left = left + _squared(recording.held[key], truth[key])
                    full = full + _squared(reused, truth[key])
            for result in results[1:]:
                entries += result.shared_tokens * result.layers
                recomputed += (result.shared_tokens * result.layers - result.entries.reused - result.entries.corrected)
    if not float(full.sum()) > 0:
        raise DataError("full-shared makes no error on these chains: give chains whose agents have different prompts")
    return left, full, recomputed / max(1, entries)


def _held(engine: HFEngine, method: Recipe, chain: Chain) -> Held:
    recording = Recording(method.reference)
    with Session(engine, replace(method, reference=recording, corrector=NoCorrection())) as session:
        replay(session, chain)
    return recording.held


def _squared(held: KV, truth: KV) -> Tensor:
    """``[L-1]`` squared error of unrotated keys and values, layer 0 left out."""
    k, v = held.k[1:].double() - truth.k[1:].double(), held.v[1:].double() - truth.v[1:].double()
    return k.square().sum((1, 2, 3)).cpu() + v.square().sum((1, 2, 3)).cpu()
