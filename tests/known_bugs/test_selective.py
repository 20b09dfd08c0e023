"""S1 to S5: selective recompute. (S6 is about a vLLM scheduler and is tested with it.)"""

from __future__ import annotations

import pytest
import torch

from hops import ANSWER, dense, run, same
from kvbaton.bench.accounting import account, require_reuse
from kvbaton.engine.session import Session
from kvbaton.errors import DataError
from kvbaton.overrides import override_all
from kvbaton.recipes import recipe
from tiny import engine, ids, prompt

QUESTION = ("question", ids(40, 1))
SOURCE = prompt("solver", (None, ids(5, 2)), QUESTION, (None, ids(4, 3)))
READER = prompt("critic", (None, ids(9, 4)), QUESTION, (None, ids(6, 5)))
SELECTIVE = {
    "cacheblend": (), "epic": ("selector.rows=4",), "prophetkv": (), "random": (),
    "droidspeak": ("selector.first=1", "selector.last=2"), "relaycaching": ("selector.detect=1", "selector.last=2"),
}


@pytest.mark.parametrize("name", SELECTIVE)
def test_s1_a_cached_prefix_shifts_no_selected_row(name: str) -> None:
    """Rows chosen in the coordinates of the reused text, with the role prompt already in the prefix cache."""
    method = override_all(recipe(name), SELECTIVE[name])
    cold = run(engine(), method, SOURCE, READER, prefix_cache=False)[1]
    with Session(engine(), method) as session:
        for _ in range(2):
            store = session.start_run()
            session.hop(SOURCE, ANSWER, store)
            warm = session.hop(READER, ANSWER, store)
    assert warm.entries.cached == 9 * warm.layers
    assert warm.rows_per_layer == cold.rows_per_layer
    assert same(warm, cold)


@pytest.mark.parametrize("name", SELECTIVE)
@pytest.mark.parametrize("repeated", [False, True])
def test_s2_a_prompt_that_is_all_hit_still_computes_its_last_row(name: str, repeated: bool) -> None:
    method = override_all(recipe(name), SELECTIVE[name])
    whole = prompt("critic", *[QUESTION] * (2 if repeated else 1))
    hops = run(engine(), method, SOURCE, whole, whole)
    for hop in hops[1:]:
        assert hop.entries.recomputed >= hop.layers
        assert torch.isfinite(hop.logits).all()


@pytest.mark.parametrize("name", SELECTIVE)
def test_s3_a_plain_request_without_any_shared_text_works(name: str) -> None:
    plain = prompt("critic", (None, ids(30, 8)))
    assert same(run(engine(), override_all(recipe(name), SELECTIVE[name]), plain)[0], dense(engine(), plain))


def test_s4_a_changed_lead_in_does_not_end_the_hit() -> None:
    """The contract is not one contiguous computed prefix: the whole text is reused behind new words."""
    changed = prompt("critic", (None, ids(17, 44)), QUESTION, (None, ids(1, 9)), QUESTION, (None, ids(6, 5)))
    _, hop = run(engine(), "full-shared", SOURCE, changed)
    assert hop.entries.reused == 2 * 40 * hop.layers
    assert hop.entries.recomputed == (17 + 1 + 6) * hop.layers


def test_s5_a_method_that_silently_never_ran_is_an_error() -> None:
    unrelated = prompt("critic", (None, ids(9, 4)), ("question", ids(40, 77)), (None, ids(6, 5)))
    method = recipe("cacheblend")
    hops = run(engine(), method, SOURCE, unrelated)
    with pytest.raises(DataError, match="never reused anything"):
        require_reuse(method, account(method, [hops]))
    require_reuse(method, account(method, [run(engine(), method, SOURCE, READER)]))
