"""Every registered recipe x every invariant, on tiny random models. A new recipe is tested by being registered."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import pytest
import torch

from kvbaton.bench.coverage import Recording
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.result import HopResult
from kvbaton.engine.sampling import Force
from kvbaton.engine.session import Session
from kvbaton.kv import KV
from kvbaton.prompt import Prompt, Segment
from kvbaton.recipes import Mask, PrivateText, Recipe, names, recipe
from kvbaton.references import Isolated, RunStore
from kvbaton.selectors.base import AllRows, NoRows
from kvbaton.selectors.combine import Split, Union
from kvbaton.selectors.deviation import Deviation
from kvbaton.selectors.layers import LayerBlock
from kvbaton.selectors.leading import Leading
from kvbaton.selectors.random import RandomRows
from kvbaton.selectors.relay import Relay
from tiny import engine as engine_of
from tiny import ids

METHODS = names()
CLOSE = dict(rtol=0.0, atol=2e-4)  # noqa: C408


@pytest.fixture(params=["llama", "qwen2"])
def engine(request: pytest.FixtureRequest) -> HFEngine:
    return engine_of(request.param)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Recipe:
    return fitted(recipe(request.param))


def fitted(method: Recipe) -> Recipe:
    """Layers of a recipe that fit a model of four; a row count that is a part of a short text."""
    selector = method.selector
    if isinstance(selector, LayerBlock):
        selector = LayerBlock(1, 2)
    if isinstance(selector, Relay):
        selector = replace(selector, first=1, detect=1, last=2)
    if isinstance(selector, Leading) and selector.rows is not None:
        selector = replace(selector, rows=3)
    return replace(method, selector=selector)


def own(count: int, seed: int) -> Segment:
    return Segment(ids(count, 10_000 + seed))


def text(seed: int, count: int = 24) -> Segment:
    return Segment(ids(count, seed), "question")


FORCED = Force(ids(5, 77))


@dataclass
class Scene:
    """Two agents that read the same question. ``hop`` runs the second one on a fresh run after the first."""

    engine: HFEngine
    method: Recipe
    question: Segment
    reader: Prompt
    source: Prompt | None = None
    prefix_cache: bool = True
    held: dict[Any, KV] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recording = Recording(self.method.reference, self.held)
        self.session = Session(self.engine, replace(self.method, reference=recording), prefix_cache=self.prefix_cache)
        if self.source is None:
            self.source = Prompt("solver", (own(6, 1), self.question, own(3, 2)))

    def learn(self, texts: int = 3) -> None:
        """Let the method learn from other texts, then from this one (methods that need the exact relation)."""
        if self.method.corrector.learns:
            lengths = len(self.question)
            for question in [*(text(500 + i, lengths + 2 * i) for i in range(texts)), *[self.question] * 3]:
                run = self.session.start_run()
                for prompt in (self.source, self.reader):
                    assert prompt is not None
                    swapped = tuple(question if s.share == "question" else s for s in prompt.segments)
                    self.session.hop(Prompt(prompt.reader, swapped), FORCED, run)

    def started(self) -> RunStore:
        run = self.session.start_run()
        assert self.source is not None
        self.session.hop(self.source, FORCED, run)
        return run

    def hop(self) -> HopResult:
        self.learn()
        return self.session.hop(self.reader, FORCED, self.started())

    def reader_holds(self) -> KV:
        return self.held[self.reader.reader, "question", self.question.token_ids]


def usual(engine: HFEngine, method: Recipe, seed: int = 0) -> Scene:
    question = text(seed)
    return Scene(engine, method, question, Prompt("critic", (own(9, 3), question, own(4, 4))))


def dense(engine: HFEngine, prompt: Prompt) -> HopResult:
    with Session(engine, recipe("dense"), prefix_cache=False) as session:
        return session.hop(prompt, FORCED, session.start_run())


@contextmanager
def counted_rows(engine: HFEngine) -> Iterator[list[int]]:
    """Rows that really go through each decoder layer, call by call, seen from outside the engine."""
    rows: list[int] = []
    hooks = [layer.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
             for layer in engine.layers]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def reuses(result: HopResult) -> bool:
    return not result.dense


# --- the books ---------------------------------------------------------------------------------------------------


def test_every_method_but_dense_reuses_something(engine: HFEngine, method: Recipe) -> None:
    result = usual(engine, method).hop()
    assert reuses(result) == (method.name != "dense"), [d.reason for d in result.decisions]


def test_the_charged_rows_are_the_rows_that_ran(engine: HFEngine, method: Recipe) -> None:
    scene = usual(engine, method)
    scene.learn()
    run = scene.started()
    with counted_rows(engine) as rows:
        result = scene.session.hop(scene.reader, FORCED, run)
    answer = len(FORCED.ids) * result.layers
    truth = len(scene.reader) * result.layers if method.corrector.needs_truth else 0
    assert sum(rows) == result.entries.recomputed + result.extra_entries + answer + truth


def test_the_entries_sum_and_the_rows_per_layer_explain_them(engine: HFEngine, method: Recipe) -> None:
    result = usual(engine, method).hop()
    entries, layers = result.entries, result.layers
    assert entries.total == result.prompt_tokens * layers
    assert len(result.rows_per_layer) == layers
    reused_tokens = sum(d.tokens for d in result.decisions if d.action != "recompute" and d.share is not None)
    most = reused_tokens * layers
    assert entries.reused + entries.corrected <= most or method.private is not PrivateText.EXACT
    if method.lead_rows == 0 and method.private is PrivateText.EXACT:
        assert entries.reused + entries.corrected == most - sum(result.rows_per_layer)


# --- exactness ---------------------------------------------------------------------------------------------------


def full_budget(method: Recipe) -> Recipe | None:
    """The recipe with every row of every layer selected; None where the selector has no budget."""
    selector = method.selector
    if isinstance(selector, LayerBlock):
        return replace(method, selector=LayerBlock(0, 3))
    if isinstance(selector, Relay):
        return replace(method, selector=replace(selector, first=0, last=None, share=1.0))
    if isinstance(selector, Leading):
        return replace(method, selector=Leading(share=1.0))
    if is_dataclass(selector) and hasattr(selector, "share"):
        return replace(method, selector=replace(selector, share=1.0))
    return None


def test_full_budget_is_dense(engine: HFEngine, method: Recipe) -> None:
    full = full_budget(method) or replace(method, selector=AllRows())
    if full.private is not PrivateText.EXACT:
        full = replace(full, private=PrivateText.EXACT)
    scene = usual(engine, full)
    result = scene.hop()
    torch.testing.assert_close(result.logits, dense(engine, scene.reader).logits, **CLOSE)
    if reuses(result):
        assert set(result.rows_per_layer) == {len(scene.question) - full.lead_rows}


def zero_budget(method: Recipe) -> Recipe | None:
    selector = method.selector
    if isinstance(selector, Leading):
        return replace(method, selector=Leading(rows=0))
    if is_dataclass(selector) and hasattr(selector, "share"):
        return replace(method, selector=replace(selector, share=0.0))
    return None


def test_zero_budget_is_reuse_without_selection(engine: HFEngine, method: Recipe) -> None:
    none = zero_budget(method)
    if none is None:
        pytest.skip("the selector has no budget")
    result, plain = (usual(engine, m).hop() for m in (none, replace(method, selector=NoRows())))
    assert set(result.rows_per_layer) <= {0}
    assert torch.equal(result.logits, plain.logits)


def test_layer_0_of_shared_text_is_exact_after_moving(engine: HFEngine, method: Recipe) -> None:
    scene = usual(engine, method)
    scene.hop()
    truth = usual(engine, recipe("dense"))
    truth.hop()
    if scene.method.name == "dense":
        return
    moved, exact = scene.reader_holds(), truth.reader_holds()
    torch.testing.assert_close(moved.k[0], exact.k[0], **CLOSE)
    torch.testing.assert_close(moved.v[0], exact.v[0], **CLOSE)


def test_equal_prefixes_make_every_method_exact(engine: HFEngine, method: Recipe) -> None:
    """The reused KV is right then, so whatever a method recomputes must come out as it was: no row sees a later key."""
    if method.mask is Mask.BOTTOM_RIGHT:
        pytest.skip("its mask shows later keys on purpose; see below")
    question = text(3)
    lead: tuple[Segment, ...] = (own(6, 1),)
    if isinstance(method.reference, Isolated):
        lead, method = (), replace(method, reference=replace(method.reference, lead_tokens=0))
    source, reader = (Prompt(name, (*lead, question, own(tail, 40 + tail)))
                      for name, tail in (("solver", 3), ("critic", 8)))
    scene = Scene(engine, replace(method, private=PrivateText.EXACT), question, reader, source)
    torch.testing.assert_close(scene.hop().logits, dense(engine, reader).logits, **CLOSE)


def test_the_bottom_right_mask_shows_later_keys_and_the_exact_mask_does_not(engine: HFEngine) -> None:
    def held_before(later: int, mask: Mask) -> KV:
        """What the reader holds of the question if the shared text behind it is number ``later``."""
        question, notes = text(3), Segment(ids(24, later), "notes")
        source = Prompt("solver", (own(6, 1), question, notes, own(3, 2)))
        reader = Prompt("critic", (own(9, 3), question, notes, own(2, 4)))
        scene = Scene(engine, replace(recipe("random"), mask=mask), question, reader, source)
        scene.hop()
        return scene.reader_holds()

    one, two = held_before(50, Mask.EXACT), held_before(51, Mask.EXACT)
    assert torch.equal(one.v, two.v), "selected rows may not depend on what stands behind them"
    one, two = held_before(50, Mask.BOTTOM_RIGHT), held_before(51, Mask.BOTTOM_RIGHT)
    assert not torch.allclose(one.v, two.v, atol=1e-3)


def test_combined_selectors_compute_what_their_parts_want(engine: HFEngine) -> None:
    """First rows everywhere, a block of layers from kept hidden states; then a budget split between two rules."""
    both = replace(recipe("full-shared"), selector=Union((Leading(rows=2), LayerBlock(2, 2))))
    assert usual(engine, both).hop().rows_per_layer == (2, 2, 24, 2)
    split = replace(recipe("full-shared"), selector=Split((RandomRows(0.25), Deviation(0.25))))
    assert usual(engine, split).hop().rows_per_layer == (24, 24, 12, 12)


# --- the stored cache is never written to --------------------------------------------------------------------------


def test_two_runs_on_one_stored_cache_give_equal_bits(engine: HFEngine, method: Recipe) -> None:
    scene = replace(usual(engine, method), prefix_cache=False)
    scene.learn()
    run = scene.started()
    stored = {key: (kv.k.clone(), kv.v.clone()) for key, kv in run._held.items()}
    results = []
    for _ in range(2):
        again = copy.copy(run)
        again._held = dict(run._held)
        results.append(scene.session.hop(scene.reader, FORCED, again))
    assert torch.equal(results[0].logits, results[1].logits)
    assert all(torch.equal(run._held[key].k, k) and torch.equal(run._held[key].v, v) for key, (k, v) in stored.items())


# --- odd prompts ---------------------------------------------------------------------------------------------------


def odd_prompts() -> dict[str, Prompt]:
    q, one = text(5), Segment(ids(1, 6), "question")
    return {
        "all shared": Prompt("critic", (q,)),
        "shared first": Prompt("critic", (q, own(4, 4))),
        "shared last": Prompt("critic", (own(9, 3), q)),
        "repeated": Prompt("critic", (own(9, 3), q, own(4, 4), q, own(2, 5))),
        "adjacent repeat": Prompt("critic", (own(9, 3), q, q, own(2, 5))),
        "one token": Prompt("critic", (own(9, 3), one, own(4, 4))),
        "only one token": Prompt("critic", (one,)),
    }


@pytest.mark.parametrize("case", odd_prompts())
@pytest.mark.parametrize("name", METHODS)
def test_odd_prompts(case: str, name: str) -> None:
    engine, reader, method = engine_of("llama"), odd_prompts()[case], fitted(recipe(name))
    question = next(segment for segment in reader.segments if segment.share)
    scene = Scene(engine, method, question, reader)
    result = scene.hop()
    assert result.logits is not None
    assert torch.isfinite(result.logits).all()
    assert result.entries.recomputed + result.entries.cached >= result.layers, "the last prompt row is always computed"
    full = full_budget(replace(method, private=PrivateText.EXACT))
    if full is not None:
        torch.testing.assert_close(Scene(engine, full, question, reader).hop().logits, dense(engine, reader).logits,
                                   **CLOSE)


def test_a_prompt_with_no_shared_text_is_dense(engine: HFEngine, method: Recipe) -> None:
    prompt = Prompt("critic", (own(9, 3),))
    with Session(engine, method) as session:
        result = session.hop(prompt, FORCED, session.start_run())
    torch.testing.assert_close(result.logits, dense(engine, prompt).logits, **CLOSE)
    assert result.dense


def test_the_prefix_cache_changes_no_result(engine: HFEngine, method: Recipe) -> None:
    question = text(0)
    reader = Prompt("critic", (own(9, 3), question, own(4, 4)))
    results = []
    for on in (True, False):
        scene = Scene(engine, method, question, reader, prefix_cache=on)
        scene.hop()
        results.append(scene.session.hop(reader, FORCED, scene.started()))
    cached, plain = results
    assert (cached.entries.cached, plain.entries.cached) == (9 * cached.layers, 0)
    torch.testing.assert_close(cached.logits, plain.logits, **CLOSE)
