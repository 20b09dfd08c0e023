"""A chain of fixed hops: the prompts and dense answers of one run, replayed under any recipe.

    hop 0   solver  reads question            answers a0      every recipe reads the same ids and is forced
    hop 1   critic  reads question, a0        answers a1      to the same dense answers, so that its logits
    hop 2   judge   reads question, a0, a1    answers a2      can be compared token by token
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvbaton.engine.divergence import divergence as logit_divergence
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Force, Generate
from kvbaton.engine.session import Session
from kvbaton.errors import InvariantError
from kvbaton.prompt import Prompt
from kvbaton.recipes import recipe


@dataclass(frozen=True)
class Turn:
    """One hop: its prompt, the dense answer's ids and the share that the answer fills."""

    prompt: Prompt
    answer: tuple[int, ...]
    writes: str | None = None


Chain = Sequence[Turn]
Reader = Callable[[dict[str, tuple[int, ...]]], Prompt]
"""Builds a hop's prompt from the ids of the answers before it."""


def dense_chain(engine: HFEngine, readers: Sequence[tuple[Reader, str | None]], answer_tokens: int) -> list[Turn]:
    """Let the model answer each hop densely and greedily; the turns to replay."""
    answers: dict[str, tuple[int, ...]] = {}
    turns = []
    with Session(engine, recipe("dense")) as session:
        run = session.start_run()
        for read, writes in readers:
            prompt = read(answers)
            ids = session.hop(prompt, Generate(max_new_tokens=answer_tokens), run, writes=writes).output_ids
            answer = ids or (min(engine.eos_ids, default=0),)
            if writes is not None:
                answers[writes] = answer
            turns.append(Turn(prompt, answer, writes))
    return turns


def replay(session: Session, chain: Chain) -> list[HopResult]:
    """Run a chain's hops in a new run of ``session``, each forced to its dense answer."""
    return session.play((turn.prompt, Force(turn.answer), turn.writes) for turn in chain)


def divergence(dense: HopResult, other: HopResult) -> float:
    """KL(dense || other) in nats a token, over the forced answer."""
    return logit_divergence(_logits(dense), _logits(other))


def agreement(dense: HopResult, other: HopResult) -> float:
    """Share of the forced answer's tokens where both rank the same token first."""
    same: Tensor = _logits(dense).argmax(-1) == _logits(other).argmax(-1)
    return float(same.float().mean())


def _logits(result: HopResult) -> Tensor:
    if result.logits is None:
        raise InvariantError(f"the hop of {result.reader!r} was not forced: it has no logits to compare")
    return result.logits
