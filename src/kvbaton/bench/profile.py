"""DroidSpeak's offline profile: which block of layers to recompute, found by trying them all.

Every block ``[first, last]`` is scored by the divergence that is left when its layers are recomputed and the others
reused. The best block of a width is served at the budget ``width / layers``; what no cheaper block beats is the
Pareto front. A profile is frozen per model and kept as a small JSON file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from kvbaton.bench.chain import Chain, dense_chain, divergence, replay
from kvbaton.bench.data import Row
from kvbaton.bench.script import Script
from kvbaton.bench.tasks.base import Task
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.session import Session
from kvbaton.errors import DataError, UsageError
from kvbaton.recipes import recipe
from kvbaton.selectors.layers import LayerBlock


@dataclass(frozen=True, order=True)
class Scored:
    """One block: layers ``first`` to ``last``, both recomputed, and the mean ``divergence`` left, nats a token."""

    divergence: float
    first: int
    last: int

    @property
    def width(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Profile:
    """Scored blocks of one model. ``nothing``: divergence with no block at all."""

    model: str
    layers: int
    nothing: float
    blocks: tuple[Scored, ...]

    def best(self, budget: float) -> Scored:
        """The best block of at most ``budget`` of the layers, at least one layer wide."""
        width = width_of(budget, self.layers)
        fitting = [block for block in self.blocks if block.width <= width]
        if not fitting:
            raise UsageError(f"no scored block is {width} layers wide or narrower: profile that width first")
        return min(fitting)

    def pareto(self) -> tuple[Scored, ...]:
        """Blocks that no block of the same or a smaller width beats, narrow to wide."""
        front: list[Scored] = []
        for block in sorted(self.blocks, key=lambda block: (block.width, block)):
            if not front or block.divergence < front[-1].divergence:
                front.append(block)
        return tuple(front)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile, whole or not at all."""
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a saved profile. Raises DataError if it is not one."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
            blocks = tuple(Scored(float(b["divergence"]), int(b["first"]), int(b["last"])) for b in raw["blocks"])
            return cls(str(raw["model"]), int(raw["layers"]), float(raw["nothing"]), blocks)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is no profile: {error}") from error


def width_of(budget: float, layers: int) -> int:
    """Layers that a budget pays for: rounded, at least one."""
    return max(1, int(budget * layers + 0.5))


def blocks_of(layers: int, widths: Iterable[int]) -> list[LayerBlock]:
    """Every block of the given widths. A block starts at layer 1 or above: layer 0 is exact after moving."""
    return [LayerBlock(first, first + width - 1)
            for width in sorted(set(widths)) for first in range(1, layers - width + 1)]


def search(model: str, layers: int, widths: Iterable[int], left: Callable[[LayerBlock | None], float]) -> Profile:
    """Score every block with ``left(block)``, the divergence that it leaves; ``left(None)``: without any block."""
    scored = tuple(Scored(left(block), block.first, block.last) for block in blocks_of(layers, widths))
    if not scored:
        raise UsageError(f"no block of widths {sorted(set(widths))} fits above layer 0 of a model of {layers} layers")
    return Profile(model, layers, left(None), scored)


def calibration(engine: HFEngine, task: Task, rows: Sequence[Row], answer_tokens: int,
                progress: Callable[[int], None] = lambda done: None) -> list[Chain]:
    """Chains of dense answers to a task's questions. Raises UsageError if the model has no tokenizer."""
    if engine.text is None:
        raise UsageError("this model has no tokenizer: calibration prompts are text")
    script = Script(engine.text, task.agents(), engine.eos_ids)
    chains: list[Chain] = []
    for index, row in enumerate(rows):
        question = task.question(row, index)
        if question is not None:
            readers = [(partial(script.prompt, agent, question), agent.name) for agent in script.agents]
            chains.append(dense_chain(engine, readers, answer_tokens))
        progress(index + 1)
    return chains


def profile_droidspeak(engine: HFEngine, chains: Sequence[Chain], widths: Iterable[int],
                       progress: Callable[[LayerBlock | None], None] = lambda block: None) -> Profile:
    """Profile ``engine``'s model on calibration ``chains``: the mean divergence of the hops that reuse."""
    with Session(engine, recipe("dense")) as session:
        dense = [replay(session, chain) for chain in chains]

    def left(block: LayerBlock | None) -> float:
        progress(block)
        method = recipe("full-shared") if block is None else replace(recipe("droidspeak"), selector=block)
        with Session(engine, method) as session:
            pairs = [pair for truth, chain in zip(dense, chains, strict=True)
                     for pair in zip(truth, replay(session, chain), strict=True)]
        scores = [divergence(truth, result) for truth, result in pairs if not result.dense]
        if not scores:
            raise DataError("no hop of the calibration chains reuses anything: a chain needs two agents or more")
        return sum(scores) / len(scores)

    return search(engine.identity.name, engine.geometry.layers, widths, left)
