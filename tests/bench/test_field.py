"""Chains, coverage and DroidSpeak's profile: on synthetic scores and on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.bench.chain import Turn, agreement, dense_chain, divergence, replay
from kvbaton.bench.coverage import Ruler, coverage
from kvbaton.bench.profile import Profile, Scored, blocks_of, profile_droidspeak, search
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.session import Session
from kvbaton.errors import DataError, UsageError
from kvbaton.overrides import override
from kvbaton.prompt import Prompt, Segment
from kvbaton.recipes import recipe
from kvbaton.selectors.layers import LayerBlock
from tiny import engine as engine_of
from tiny import ids


@pytest.fixture(scope="module")
def engine() -> HFEngine:
    return engine_of("llama")


def team(engine: HFEngine, seed: int = 0) -> list[Turn]:
    """Two agents read one question; the second also reads what the first wrote."""
    question = Segment(ids(40, seed), "question")

    def solver(answers: dict[str, tuple[int, ...]]) -> Prompt:
        return Prompt("solver", (Segment(ids(7, 901)), question, Segment(ids(3, 902))))

    def critic(answers: dict[str, tuple[int, ...]]) -> Prompt:
        return Prompt("critic", (Segment(ids(12, 903)), question, Segment(ids(2, 904)),
                                 Segment(answers["solver"], "solver"), Segment(ids(3, 905))))

    return dense_chain(engine, [(solver, "solver"), (critic, None)], answer_tokens=8)


def test_a_chain_replayed_densely_diverges_nowhere(engine: HFEngine) -> None:
    chain = team(engine)
    with Session(engine, recipe("dense")) as session:
        one, two = replay(session, chain), replay(session, chain)
    assert [divergence(a, b) for a, b in zip(one, two, strict=True)] == pytest.approx([0, 0], abs=1e-9)
    assert agreement(one[1], two[1]) == 1.0
    with Session(engine, recipe("full-shared")) as session:
        shared = replay(session, chain)
    assert divergence(one[0], shared[0]) == pytest.approx(0.0, abs=1e-9)
    assert divergence(one[1], shared[1]) > 1e-3


def test_coverage_of_nothing_is_none_and_of_everything_all(engine: HFEngine) -> None:
    chains = [team(engine)]
    assert coverage(engine, recipe("full-shared"), chains).total == 0.0
    every_row = coverage(engine, override(recipe("random"), "selector.share=1"), chains)
    assert every_row.total == pytest.approx(1.0, abs=1e-6)
    assert (every_row.budget, len(every_row.layers)) == (1.0, engine.geometry.layers - 1)


def test_coverage_reports_the_budget_and_random_rows_at_it(engine: HFEngine) -> None:
    found = coverage(engine, override(recipe("cacheblend"), "selector.share=0.25"), [team(engine), team(engine, 1)])
    layers = engine.geometry.layers
    assert found.budget == pytest.approx((2 + 0.25 * (layers - 2)) / layers, abs=0.02)
    assert 0.0 < found.random < 1.0
    assert 0.0 < found.total < 1.0
    assert found.layers[0] == pytest.approx(1.0, abs=1e-6), "layer 1 is a check layer: computed in full"


def test_coverage_of_some_shares_only(engine: HFEngine) -> None:
    chains, method = [team(engine)], override(recipe("cacheblend"), "selector.share=0.25")
    parts = [Ruler(engine, chains, frozenset({share})).coverage(method).total for share in ("question", "solver")]
    assert min(parts) <= coverage(engine, method, chains).total <= max(parts)
    assert parts[0] != parts[1]
    with pytest.raises(DataError):
        Ruler(engine, chains, frozenset({"nobody"}))


def test_coverage_needs_an_error_to_cover(engine: HFEngine) -> None:
    lonely = [Turn(Prompt("solver", (Segment(ids(9, 1)), Segment(ids(5, 2), "question"), Segment((1,)))), (3, 4))]
    with pytest.raises(DataError, match="no error"):
        coverage(engine, recipe("cacheblend"), [lonely])


def test_search_scores_every_block_above_layer_zero() -> None:
    assert blocks_of(5, [3]) == [LayerBlock(1, 3), LayerBlock(2, 4)]
    left = {(2, 2): 0.5, (3, 3): 0.9, (4, 4): 0.7, (1, 1): 0.8, (2, 3): 0.6, (3, 4): 0.2, (1, 2): 0.65}
    found = search("toy", 5, [1, 2], lambda block: 1.0 if block is None else left[block.first, block.last])
    assert found.best(0.2) == Scored(0.5, 2, 2)
    assert found.best(0.4) == Scored(0.2, 3, 4)
    assert [(b.first, b.last) for b in found.pareto()] == [(2, 2), (3, 4)]


def test_pareto_leaves_out_wider_blocks_that_are_no_better() -> None:
    found = Profile("toy", 9, 1.0, (Scored(0.5, 2, 2), Scored(0.5, 2, 3), Scored(0.1, 4, 6)))
    assert [b.width for b in found.pareto()] == [1, 3]


def test_profile_is_kept_as_json(tmp_path: Path) -> None:
    found = Profile("toy", 9, 1.0, (Scored(0.5, 2, 2), Scored(0.25, 2, 3)))
    found.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == found
    (tmp_path / "p.json").write_text('{"model": "toy"}')
    with pytest.raises(DataError, match="no profile"):
        Profile.load(tmp_path / "p.json")


def test_no_block_fits() -> None:
    with pytest.raises(UsageError, match="fits"):
        search("toy", 3, [4], lambda block: 0.0)
    with pytest.raises(UsageError, match="wide"):
        Profile("toy", 9, 1.0, (Scored(0.5, 2, 4),)).best(0.1)


def test_droidspeak_profile_on_a_tiny_model(engine: HFEngine) -> None:
    chains = [team(engine, seed) for seed in range(2)]
    found = profile_droidspeak(engine, chains, widths=[2, engine.geometry.layers - 1])
    assert found.best(2 / engine.geometry.layers).width == 2
    assert found.best(1.0).divergence < found.nothing
    assert len(found.blocks) == 3
