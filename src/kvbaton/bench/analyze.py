"""`kvbaton analyze`: what reuse does to keys and values, seen from inside.

    rank       effective rank of a text's KV and of its offset (true KV minus the source's), layer by layer
    error      relative error of reused KV against dense, by layer and by agent: chained, origin, isolated, any method
    coverage   share of full-shared error that each method removes, beside random rows at the same budget

All of it runs on chains: the hops of a task's team with its dense answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvbaton.bench.chain import Chain, replay
from kvbaton.bench.coverage import Recording, Ruler
from kvbaton.bench.result import Record
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.session import Session
from kvbaton.errors import DataError, UsageError
from kvbaton.gates import Always
from kvbaton.kv import KV
from kvbaton.lowrank import effective_rank
from kvbaton.prompt import Segment
from kvbaton.recipes import Recipe, recipe
from kvbaton.references import Chained, Isolated, Keep, Origin, RunStore

Step = Callable[[str], None]
"""Called with what has just been done."""


@dataclass(frozen=True)
class Witness:
    """A reference that hands out nothing and notes every KV that is read or written, in order."""

    seen: list[tuple[Segment, KV]] = field(default_factory=list, compare=False)
    encodes_alone: ClassVar[bool] = False
    lead_tokens: ClassVar[int] = 0
    keeps: ClassVar[frozenset[Keep]] = frozenset(Keep)
    absent: ClassVar[str] = "dense method"

    def resolve(self, segment: Segment, run: RunStore) -> KV | None:
        return None

    def encoded(self, segment: Segment, alone: KV, run: RunStore) -> None: ...

    def read(self, segment: Segment, held: KV, run: RunStore) -> None:
        self.seen.append((segment, held))

    def wrote(self, segment: Segment, held: KV, run: RunStore) -> None:
        self.seen.append((segment, held))


@dataclass(frozen=True)
class Pair:
    """One text as its first owner and as a later reader hold it, both exact."""

    share: str
    source: KV
    target: KV


def pairs(engine: HFEngine, chain: Chain) -> Iterator[Pair]:
    """Every handed-over text of a chain, dense at both ends, of equal length (a writer lacks its last token)."""
    witness = Witness()
    with Session(engine, replace(recipe("dense"), reference=witness)) as session:
        replay(session, chain)
    owners: dict[tuple[str | None, tuple[int, ...]], KV] = {}
    for segment, held in witness.seen:
        source = owners.setdefault((segment.owner, segment.token_ids), held)
        if source is not held:
            length = min(len(source), len(held))
            yield Pair(segment.share or "", source.rows(0, length), held.rows(0, length))


def rank(engine: HFEngine, chains: Sequence[Chain], step: Step) -> Iterator[Record]:
    """A record a layer: mean effective rank of base and offset, for unrotated and rotated keys and for values."""
    sums, count = torch.zeros(5, engine.geometry.layers, dtype=torch.float64), 0
    for i, chain in enumerate(chains, 1):
        for pair in pairs(engine, chain):
            sums += _ranks(engine, pair)
            count += 1
        step(f"text {i}")
    if not count:
        raise DataError("no text was handed over: the task's agents share nothing")
    names = ("base_k", "base_v", "offset_k", "offset_k_rotated", "offset_v")
    for layer, values in enumerate((sums / count).T.tolist()):
        named = dict(zip(names, values, strict=True))
        yield {"question": f"layer {layer}", "method": "all texts", "repeat": 0, **named}


def _ranks(engine: HFEngine, pair: Pair) -> Tensor:
    """``[5, L]``: base k, base v, offset of unrotated k, offset of rotated k (source moved to the target), offset v."""
    source, target = pair.source, pair.target
    positions = torch.arange(target.start, target.start + len(target), device=target.k.device)
    rotated = torch.stack([_rotated(engine, target.k[i].float() - source.k[i].float(), positions, i)
                           for i in range(engine.geometry.layers)])
    parts = (source.k, source.v, target.k.float() - source.k.float(), rotated, target.v.float() - source.v.float())
    return torch.stack([effective_rank(_rows(part)).cpu().double() for part in parts])


def _rotated(engine: HFEngine, keys: Tensor, positions: Tensor, layer: int) -> Tensor:
    return engine.rope.rotate(keys, *engine.rope.angles(positions, layer))


def _rows(part: Tensor) -> Tensor:
    """``[L, H, T, D]`` as ``[L, T, H*D]``."""
    return part.transpose(1, 2).flatten(2)


def starting_points() -> tuple[Recipe, ...]:
    """Reuse without correction from each of the three references."""
    plain = recipe("full-shared")
    return (replace(plain, name="chained", reference=Chained()), replace(plain, name="origin", reference=Origin()),
            replace(plain, name="isolated", reference=Isolated(writer=True)))


def error(engine: HFEngine, methods: Sequence[Recipe], chains: Sequence[Chain], learn_from: Sequence[Chain],
          step: Step) -> Iterator[Record]:
    """Records by layer and by agent along the chain: relative Frobenius error of handed-over text, keys and values.

    Gates are set to always, so that every method is seen where it reuses.
    """
    truths = [_held(engine, chain) for chain in chains]
    for method in methods:
        recording = Recording(method.reference)
        squares: dict[str, Tensor] = {}
        with Session(engine, replace(method, reference=recording)) as session:
            for chain in learn_from if method.corrector.learns else ():
                replay(session, chain)
            session.follow(replace(session.recipe, gate=Always(), hop_fallback=False))
            for chain, truth in zip(chains, truths, strict=True):
                recording.held.clear()
                replay(session, chain)
                for key, held in recording.held.items():
                    if not held.exact:
                        found = _squares(held, truth[key])
                        squares[key[0]] = squares.get(key[0], torch.zeros_like(found)) + found
        step(method.name)
        yield from _error_records(method.name, squares)


def _held(engine: HFEngine, chain: Chain) -> dict[tuple[str, str, tuple[int, ...]], KV]:
    recording = Recording(recipe("dense").reference)
    with Session(engine, replace(recipe("dense"), reference=recording)) as session:
        replay(session, chain)
    return dict(recording.held)


def _squares(held: KV, truth: KV) -> Tensor:
    """``[4, L]``: squared error of k, squared size of k, the same of v."""
    def total(x: Tensor) -> Tensor:
        return x.double().square().sum((1, 2, 3)).cpu()
    return torch.stack([total(held.k - truth.k), total(truth.k), total(held.v - truth.v), total(truth.v)])


def _error_records(method: str, squares: dict[str, Tensor]) -> Iterator[Record]:
    if not squares:
        raise UsageError(f"{method!r} reused nothing on these texts: give it more to learn from")
    whole = torch.stack(list(squares.values())).sum(0)
    places = {f"layer {i}": whole[:, i] for i in range(whole.shape[1])}
    places |= {f"agent {agent}": found.sum(1) for agent, found in squares.items()}
    for place, (k, k_size, v, v_size) in places.items():
        yield {"question": place, "method": method, "repeat": 0, "k_error": float((k / k_size).sqrt()),
               "v_error": float((v / v_size).sqrt())}


def cover(engine: HFEngine, methods: Sequence[Recipe], chains: Sequence[Chain], learn_from: Sequence[Chain], seed: int,
          step: Step) -> Iterator[Record]:
    """A record a method: share of full-shared error removed, its budget, random rows at that budget."""
    ruler = Ruler(engine, chains)
    for method in methods:
        found = ruler.coverage(method, learn_from if method.corrector.learns else (), seed)
        step(method.name)
        yield {"question": "all layers", "method": method.name, "repeat": 0, "removed": found.total,
               "budget": found.budget, "random": found.random, "times_random": found.times_random}
