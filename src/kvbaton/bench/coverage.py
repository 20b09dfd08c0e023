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


class Ruler:
    """Chains with their dense KV and what full-shared makes of them, computed once for any number of methods.

    ``shares``: look at the texts of these shares only; None: at all of them.
    """

    def __init__(self, engine: HFEngine, chains: Sequence[Chain], shares: frozenset[str] | None = None) -> None:
        self._engine, self._chains, self._shares = engine, chains, shares
        self._truth = [_held(engine, recipe("dense"), chain) for chain in chains]
        self._plain = [_held(engine, recipe("full-shared"), chain) for chain in chains]
        self._full = torch.zeros(engine.geometry.layers - 1, dtype=torch.float64)
        for plain, truth in zip(self._plain, self._truth, strict=True):
            self._full += self._error(plain, plain, truth)
        if not float(self._full.sum()) > 0:
            raise DataError("full-shared makes no error on these chains: give agents with different prompts")

    def coverage(self, method: Recipe, learn_from: Iterable[Chain] = (), seed: int = 0) -> Coverage:
        """Coverage of ``method``, after it learned from ``learn_from``, and of random rows (``seed``) at its budget."""
        left, budget = self._left(method, learn_from)
        random = replace(recipe("full-shared"), name="random", selector=RandomRows(min(1.0, budget), seed))
        random_left, _ = self._left(random, ())
        layers = 1.0 - left / self._full
        return Coverage(self._share(left), tuple(layers.tolist()), budget, self._share(random_left))

    def _share(self, left: Tensor) -> float:
        return float(1.0 - left.sum() / self._full.sum())

    def _left(self, method: Recipe, learn_from: Iterable[Chain]) -> tuple[Tensor, float]:
        """Squared error ``[L-1]`` that ``method`` leaves, and the share of reusable entries that it recomputed."""
        recording = Recording(method.reference)
        left = torch.zeros_like(self._full)
        recomputed = entries = 0
        with Session(self._engine, replace(method, reference=recording)) as session:
            for chain in learn_from:
                replay(session, chain)
            for chain, plain, truth in zip(self._chains, self._plain, self._truth, strict=True):
                recording.held.clear()
                for result in replay(session, chain)[1:]:
                    entries += result.reusable_tokens * result.layers
                    recomputed += (result.reusable_tokens * result.layers
                                   - result.entries.reused - result.entries.corrected)
                left += self._error(recording.held, plain, truth)
        return left, recomputed / max(1, entries)

    def _error(self, held: Held, plain: Held, truth: Held) -> Tensor:
        """``[L-1]`` squared error over the texts that full-shared reuses."""
        return torch.stack([_squared(held[key], truth[key]) for key, reused in plain.items()
                            if not reused.exact and (self._shares is None or key[1] in self._shares)]
                           or [torch.zeros(())]).sum(0)


def coverage(engine: HFEngine, method: Recipe, chains: Sequence[Chain], learn_from: Iterable[Chain] = (),
             seed: int = 0) -> Coverage:
    """`Ruler.coverage` of one method."""
    return Ruler(engine, chains).coverage(method, learn_from, seed)


def _held(engine: HFEngine, method: Recipe, chain: Chain) -> Held:
    recording = Recording(method.reference)
    with Session(engine, replace(method, reference=recording)) as session:
        replay(session, chain)
    return recording.held


def _squared(held: KV, truth: KV) -> Tensor:
    """``[L-1]`` squared error of unrotated keys and values, layer 0 left out."""
    k, v = held.k[1:].double() - truth.k[1:].double(), held.v[1:].double() - truth.v[1:].double()
    return k.square().sum((1, 2, 3)).cpu() + v.square().sum((1, 2, 3)).cpu()
