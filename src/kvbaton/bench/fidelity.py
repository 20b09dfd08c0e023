"""Fidelity to the dense answers: no answer is generated, so it needs no able model.

    dense answer a1 a2 …  forced behind the same prompt, once dense, once with the method's cache
    kl         mean over a1 …  of KL(dense || method), nats a token;  agree: same most likely token
    gold_nll   nats a token of the right answer in the stated format, behind the decider's prompt

A hop that nothing was handed to is the same with nearly every method: it is run once, and its KV given to each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbaton.bench.chain import Turn, agreement, divergence
from kvbaton.bench.measures import Handed, Scene, check_batch, hop_record, short
from kvbaton.bench.result import Record
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Force
from kvbaton.engine.session import Session
from kvbaton.errors import InvariantError
from kvbaton.kv import KV
from kvbaton.prompt import Segment
from kvbaton.recipes import PrivateText, Recipe
from kvbaton.references import Keep, Reference, RunStore


def nll(logits: Tensor | None, ids: tuple[int, ...]) -> float:
    """Mean negative log-likelihood, nats a token, of ``ids`` under the logits ``[m, vocab]`` of a forced answer."""
    if logits is None or logits.shape[0] != len(ids):
        raise InvariantError(f"want {len(ids)} rows of logits, got {None if logits is None else logits.shape[0]}")
    wanted = torch.tensor(ids, device=logits.device)[:, None]
    return float(-logits.double().log_softmax(-1).gather(1, wanted).mean())


@dataclass
class Fidelity:
    """Divergence from the dense answers, and the gold answer's NLL at the decider beside that without context.

    Kept are a run's first hop and every hop that could reuse something.

    The reference runs without the prefix cache, every measured session with it: the dense method's own divergence is
    then the noise floor of the arithmetic. Source hops that are not kept run in the reference alone, where no more is
    left of them than KV of shared text, dense or encoded alone. Dense answers of ``decoded_together`` questions are
    generated at once; in bfloat16 that may choose other tokens, so it belongs to the identity of the results where it
    is not 1.
    """

    decoded_together: int = 1
    name: ClassVar[str] = "fidelity"
    needs_answers: ClassVar[bool] = True
    batch: ClassVar[int] = 1
    _truth: list[HopResult] = field(default_factory=list)
    _sources: RunStore = field(default_factory=RunStore)
    _floor: float = 0.0

    def __post_init__(self) -> None:
        check_batch(self.decoded_together)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {} if self.decoded_together == 1 else {"decoded_together": self.decoded_together}

    def open(self, scene: Scene, reference: Session) -> None:
        self._sources = reference.start_run()
        self._truth = [reference.hop(turn.prompt, Force(turn.answer), self._sources, writes=turn.writes)
                       for turn in scene.turns]
        gold, prompt = _gold(scene), scene.script.prompt(scene.task.floor(), scene.question, {})
        self._floor = nll(reference.hop(prompt, Force(gold), reference.start_run()).logits, gold)

    def measure(self, scenes: Sequence[Scene], session: Session, repeat: int) -> list[Record]:
        (scene,) = scenes
        run, handed, gold_nll = session.start_run(), Handed(), None
        hops: list[Record] = []
        for turn, truth in zip(scene.turns, self._truth, strict=True):
            known = handed.count(turn.prompt)
            handed.wrote(turn.prompt.reader, turn.answer)
            gold = (_gold(scene),) if turn.prompt.reader == scene.task.decider else ()
            if hops and not known and not gold and _leaves_shared_kv_alone(session.recipe):
                session.encode_alone(turn.prompt, run)
                hand_over(turn, self._sources, session.recipe.reference, run)
                continue
            hop = session.hop(turn.prompt, Force(turn.answer, beside=gold), run, writes=turn.writes)
            if gold:
                gold_nll = nll(hop.beside[0], gold[0])
            if known or not hops:
                hops.append({**hop_record(hop, known), "kl": short(divergence(truth, hop)),
                             "agree": short(agreement(truth, hop))})
        run.clear()
        return [{"hops": hops, "gold_nll": gold_nll, "floor_nll": self._floor}]


def _gold(scene: Scene) -> tuple[int, ...]:
    return scene.script.ids(scene.question.gold)


def _leaves_shared_kv_alone(recipe: Recipe) -> bool:
    """Whether a source hop leaves nothing but KV of shared text, which is that of dense prefill or encoded alone.

    A method that starts from text encoded alone reuses it in source hops, too: what is written there is its own.
    """
    of_its_own = recipe.reference.encodes_alone and bool(recipe.reference.keeps)
    return not of_its_own and recipe.selector.entry is None and recipe.private is PrivateText.EXACT


def hand_over(turn: Turn, sources: RunStore, reference: Reference, run: RunStore) -> None:
    """Give ``reference`` what the source hop ``turn`` left in ``sources``, as if the hop had been run in ``run``."""
    if Keep.EXACT_READS in reference.keeps:
        for _, segment, _, _ in turn.prompt.shared():
            reference.read(segment, _held(sources, segment), run)
    if turn.writes is not None and Keep.WRITTEN in reference.keeps:
        written = Segment(turn.answer, turn.writes)
        reference.wrote(written, _held(sources, written), run)


def _held(sources: RunStore, segment: Segment) -> KV:
    kv = sources.get(segment)
    if kv is None:
        raise InvariantError(f"no source hop of the reference left {segment.share!r}: does it keep what it reads?")
    return kv
