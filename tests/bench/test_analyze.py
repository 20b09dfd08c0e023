"""Analysis on a tiny random model against plain reckoning."""

from __future__ import annotations

import pytest
import torch

from kvbaton.bench import analyze
from kvbaton.bench.chain import Turn, replay
from kvbaton.engine.session import Session
from kvbaton.errors import DataError, UsageError
from kvbaton.recipes import recipe
from tiny import engine, ids, prompt

TEXT, ANSWER = ids(24, 1), ids(6, 2)


def chain(seed: int = 0) -> list[Turn]:
    first = prompt("a", (None, ids(9, 10 + seed)), ("q", TEXT), (None, ids(3, 20)))
    second = prompt("b", (None, ids(14, 30 + seed)), ("q", TEXT), (None, ids(2, 40)), ("a", ANSWER), (None, ids(3, 50)))
    return [Turn(first, ANSWER, "a"), Turn(second, ids(4, 60), None)]


def none(_: str) -> None: ...


def test_pairs_are_first_owner_and_later_reader() -> None:
    found = list(analyze.pairs(engine(), chain()))
    assert [(p.share, p.source.source, p.target.source, len(p.source)) for p in found] == [
        ("q", "a", "b", 24), ("a", "a", "b", 6)]
    assert torch.allclose(found[0].source.k[0], found[0].target.k[0], atol=1e-5)
    assert not torch.allclose(found[0].source.k[1], found[0].target.k[1], atol=1e-3)


def test_rank_of_a_known_offset() -> None:
    records = list(analyze.rank(engine(), [chain()], none))
    assert [r["question"] for r in records] == [f"layer {i}" for i in range(4)]
    pair = next(analyze.pairs(engine(), chain()))
    matrix = (pair.target.v[2].float() - pair.source.v[2].float()).transpose(0, 1).flatten(1)
    energy = torch.linalg.svdvals(matrix).square()
    want = int((energy.cumsum(0) / energy.sum() < 0.9).sum()) + 1
    ranks = analyze._ranks(engine(), pair)
    assert int(ranks[4, 2]) == want
    rotated = analyze._rotated(engine(), pair.target.k[1].float(), torch.arange(14, 38), 1)
    assert torch.allclose(rotated.norm(dim=-1), pair.target.k[1].float().norm(dim=-1), rtol=1e-4)


def test_error_is_the_relative_norm_and_zero_at_layer_0() -> None:
    records = list(analyze.error(engine(), analyze.starting_points(), [chain()], [], none))
    by = {(r["method"], r["question"]): r for r in records}
    assert by["chained", "layer 0"]["k_error"] < 1e-5
    assert by["chained", "layer 2"]["v_error"] > 1e-3
    assert by["chained", "agent b"] == {**by["origin", "agent b"], "method": "chained"}
    pair = {p.share: p for p in analyze.pairs(engine(), chain())}
    pieces = [(p.target.v[3] - p.source.v[3], p.target.v[3]) for p in pair.values()]
    up, down = (torch.cat([x[i].flatten() for x in pieces]) for i in (0, 1))
    assert by["chained", "layer 3"]["v_error"] == pytest.approx(float(up.norm() / down.norm()), rel=1e-3)


def test_equal_prefixes_leave_no_error() -> None:
    one = prompt("a", (None, ids(9, 1)), ("q", TEXT), (None, ids(3, 2)))
    two = prompt("b", (None, ids(9, 1)), ("q", TEXT), (None, ids(3, 3)))
    turns = [Turn(one, (1,), None), Turn(two, (1,), None)]
    records = list(analyze.error(engine(), (recipe("full-shared"),), [turns], [], none))
    assert max(r["v_error"] for r in records) < 1e-5


def test_coverage_records() -> None:
    records = list(analyze.cover(engine(), (recipe("cacheblend"), recipe("random")), [chain()], [], 0, none))
    assert [r["method"] for r in records] == ["cacheblend", "random"]
    assert all(0 < r["budget"] < 1 for r in records)


def test_nothing_to_see_is_said() -> None:
    alone = [Turn(prompt("a", (None, ids(9, 1)), ("q", TEXT), (None, ids(3, 2))), (1,), None)]
    with pytest.raises(DataError, match="handed over"):
        list(analyze.rank(engine(), [alone], none))
    with pytest.raises(UsageError, match="reused nothing"):
        list(analyze.error(engine(), (recipe("full-shared"),), [alone], [], none))


def test_the_witness_changes_nothing() -> None:
    from dataclasses import replace

    with Session(engine(), recipe("dense")) as plain, \
            Session(engine(), replace(recipe("dense"), reference=analyze.Witness())) as watched:
        for a, b in zip(replay(plain, chain()), replay(watched, chain()), strict=True):
            assert a.logits is not None
            assert torch.equal(a.logits, b.logits)
