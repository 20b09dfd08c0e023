"""What a correction is told of the place it is made for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import tiny
from hops import ANSWER
from kvbaton.correctors.base import Correction
from kvbaton.engine.session import Session
from kvbaton.kv import KV
from kvbaton.prompt import Place, Prompt
from kvbaton.recipes import recipe
from toys import MeanOffset

TEXTS = {"question": tiny.ids(20, 1), "rules": tiny.ids(12, 2)}


@dataclass(frozen=True)
class Noting(MeanOffset):
    """Notes every place that it was asked to correct for."""

    places: list[Place] = field(default_factory=list)

    def correct(self, state: Any, source: KV, place: Place) -> Correction:
        self.places.append(place)
        return super().correct(state, source, place)


def prompt(reader: str, system: int, *shares: str) -> Prompt:
    return tiny.prompt(reader, (None, tiny.ids(system, system)), *((share, TEXTS[share]) for share in shares),
                       (None, tiny.ids(5, 9)))


def test_a_correction_knows_its_start_and_what_the_hop_corrects_in_all() -> None:
    corrector = Noting()
    with Session(tiny.engine(), replace(recipe("full-shared"), corrector=corrector)) as session:
        def hops(*shares: str) -> None:
            store = session.start_run()
            session.hop(prompt("solver", 9, *shares), ANSWER, store)
            session.hop(prompt("critic", 14, *shares), ANSWER, store)

        hops("question", "rules")
        hops("question", "rules")
        assert corrector.places == [Place(14, 32), Place(34, 32)]
        corrector.places.clear()
        hops("question")
        assert corrector.places == [Place(14, 20)]
