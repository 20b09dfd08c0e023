"""The books of a method: three ratios that are kept apart, and a loud end for a method that never reused."""

from __future__ import annotations

import pytest

from kvbaton.bench.accounting import account, nominal_reuse, require_reuse
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Force
from kvbaton.engine.session import Session
from kvbaton.errors import DataError
from kvbaton.overrides import override_all
from kvbaton.recipes import recipe
from tiny import engine, ids, prompt

QUESTION = ("question", ids(20, 1))


def hops(name: str, *settings: str) -> tuple[list[HopResult], object]:
    method = override_all(recipe(name), settings)
    with Session(engine(), method) as session:
        run = session.start_run()
        prompts = [prompt("solver", (None, ids(5, 2)), QUESTION, (None, ids(3, 3))),
                   prompt("critic", (None, ids(8, 4)), QUESTION, (None, ids(3, 5)))]
        return [session.hop(p, Force((1, 2)), run) for p in prompts], method


def test_selective_methods_are_charged_their_check_layers() -> None:
    run, method = hops("cacheblend", "selector.share=0.1")
    books = account(method, [run])
    assert books.nominal == pytest.approx(0.9)
    assert books.effective == pytest.approx(1 - (2 * 20 + 2 * 2) / (4 * 20))
    assert books.rows_per_layer == (20, 20, 2, 2)
    assert (books.hops, books.hop) == (1, 1.0)


def test_a_layer_block_pays_its_block_and_its_boundary() -> None:
    run, method = hops("droidspeak", "selector.first=1", "selector.last=2")
    books = account(method, [run])
    assert (books.nominal, books.effective) == (0.5, 0.5)
    assert books.rows_per_layer == (0, 20, 20, 0)
    assert books.boundary_bytes == 20 * 64 * 4
    assert books.held_bytes > books.boundary_bytes


def test_isolated_encodes_and_query_passes_are_counted_beside_the_prompt() -> None:
    alone, _ = hops("epic", "selector.rows=0")
    assert alone[0].extra_entries == 20 * 4
    asked, method = hops("prophetkv")
    assert account(method, [asked]).extra_entries == 20 * 4 + (5 + 3) * 4 + (8 + 3) * 4


def test_a_method_that_never_reused_fails_with_its_reasons() -> None:
    run, method = hops("graphflow")
    with pytest.raises(DataError, match=r"graphflow.*never reused.*nothing learned"):
        require_reuse(method, account(method, [run]))
    run, method = hops("dense")
    require_reuse(method, account(method, [run]))


def test_the_source_hop_alone_is_no_measurement() -> None:
    run, method = hops("cacheblend")
    with pytest.raises(DataError, match="two agents"):
        account(method, [run[:1]])


@pytest.mark.parametrize(("name", "nominal"), [("dense", 0.0), ("full-shared", 1.0), ("droidspeak", 0.9),
                                               ("epic", None), ("relaycaching", None), ("prophetkv", 0.8)])
def test_nominal_reuse(name: str, nominal: float | None) -> None:
    assert nominal_reuse(recipe(name), 30) == (None if nominal is None else pytest.approx(nominal))
