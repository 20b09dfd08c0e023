"""All rows active is dense prefill, and reuse is exact wherever it must be: float32, every supported family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.tiny import FAMILIES, build, engine, ids, prompt

from kvbaton.engine.hf import HFEngine
from kvbaton.engine.sampling import Force, Generate
from kvbaton.engine.session import Session
from kvbaton.gates import Always
from kvbaton.recipes import recipe
from kvbaton.references import Chained, Keep, RunStore
from kvbaton.selectors.base import AllRows

QUESTION = ids(23, 1)


def first(reader: str = "a") -> object:
    return prompt(reader, (None, ids(5, 2)), ("question", QUESTION), (None, ids(4, 3)))


def second(reader: str = "b", lead: int = 9) -> object:
    return prompt(reader, (None, ids(lead, 4)), ("question", QUESTION), (None, ids(6, 5)))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_rows_active_is_transformers_own_generate(family):
    model = build(family)
    long = prompt("a", (None, ids(40, 7)), ("question", ids(30, 8)), (None, ids(5, 9)))
    with torch.no_grad():
        theirs = model(torch.tensor([long.token_ids]), use_cache=False).logits[0]
        tokens = model.generate(torch.tensor([long.token_ids]), max_new_tokens=8, do_sample=False)[0, len(long):]
    tiny = HFEngine(model)
    with Session(tiny, recipe("dense")) as session:
        run = session.start_run()
        forced = session.hop(long, Force(tuple(tokens.tolist())), run)
        generated = session.hop(long, Generate(8), run)
    scale = theirs.abs().max()
    assert (forced.logits[0] - theirs[-1]).abs().max() / scale < 1e-5
    assert generated.output_ids == tuple(tokens.tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_0_of_shared_text_is_exact_after_moving(family):
    with Session(engine(family), recipe("full-shared")) as session:
        run = session.start_run()
        session.hop(first(), Generate(2), run)
        held = run.get(second().segments[1])
    captured = true_kv(engine(family), second())
    assert torch.allclose(held.k[0], captured.k[0], atol=1e-5)
    assert torch.allclose(held.v[0], captured.v[0], atol=1e-5)
    assert not torch.allclose(held.v[-1], captured.v[-1], atol=1e-3), "the prefixes differ: deeper layers must too"


def true_kv(tiny, asked):
    """KV of the question as a dense hop computes it."""
    with Session(tiny, recipe("full-shared")) as session:
        run = session.start_run()
        session.hop(asked, Generate(1), run)
        return run.get(asked.segments[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_prefixes_reuse_is_dense(family):
    same = prompt("b", (None, ids(5, 2)), ("question", QUESTION), (None, ids(6, 5)))
    dense, shared = (hop_after(first(), same, name, family) for name in ("dense", "full-shared"))
    assert shared.entries.reused == len(QUESTION) * shared.layers
    assert torch.allclose(dense.logits, shared.logits, atol=2e-5)


def hop_after(one, two, name, family, answer=(1, 2, 3)):
    with Session(engine(family), recipe(name)) as session:
        run = session.start_run()
        session.hop(one, Generate(2), run)
        return session.hop(two, Force(answer), run)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral-window", "gemma3"])
def test_all_reused_rows_recomputed_is_dense_bit_for_bit(family):
    every_row = replace(recipe("full-shared"), selector=AllRows(), gate=Always())
    with Session(engine(family), every_row) as session:
        run = session.start_run()
        session.hop(first(), Generate(2), run)
        recomputed = session.hop(second(), Force((1, 2, 3)), run)
    dense = hop_after(first(), second(), "dense", family)
    assert torch.equal(recomputed.logits, dense.logits)
    assert recomputed.entries.recomputed == dense.entries.recomputed


def test_reuse_computes_only_private_text_and_the_last_token():
    result = hop_after(first(), second(), "full-shared", "llama")
    assert result.entries.recomputed == (9 + 6) * result.layers
    assert result.entries.reused == len(QUESTION) * result.layers
    assert result.rows_per_layer == (0,) * result.layers


def test_prompt_that_ends_in_shared_text_computes_its_last_token():
    ends = prompt("b", (None, ids(9, 4)), ("question", QUESTION))
    result = hop_after(first(), ends, "full-shared", "llama")
    assert result.entries.recomputed == (9 + 1) * result.layers
    assert result.entries.reused == (len(QUESTION) - 1) * result.layers


def test_prompt_of_shared_text_alone():
    alone = prompt("b", ("question", QUESTION))
    result = hop_after(first(), alone, "full-shared", "llama")
    assert result.entries.recomputed == result.layers


def test_64_chained_hops_equal_one_hop_bit_for_bit():
    """Stored keys are never rotated twice: a chain of any length carries the same unrotated keys."""
    with Session(engine("llama", torch.bfloat16), recipe("full-shared")) as session:
        run = session.start_run()
        session.hop(first(), Generate(1), run)
        origin = run.get(first().segments[1])
        for hop in range(64):
            session.hop(second(f"agent-{hop}", lead=3 + hop), Generate(1), run)
        end = run.get(first().segments[1])
    assert torch.equal(origin.k, end.k)
    assert torch.equal(origin.v, end.v)
    assert end.source == "agent-63"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_prefix_cache_changes_no_logit_beyond_rounding(prefix_cache):
    with Session(engine(), recipe("dense"), prefix_cache=prefix_cache) as session:
        run = session.start_run()
        once = session.hop(second(), Force((1, 2)), run)
        again = session.hop(second(), Force((1, 2)), run)
    assert torch.allclose(once.logits, again.logits, atol=1e-5)
    assert again.entries.cached == (9 * again.layers if prefix_cache else 0)


def test_generated_text_is_held_whole_for_its_readers():
    """The last token of an answer cut by the limit was never fed while sampling: it must have KV all the same."""
    with Session(engine(), recipe("full-shared")) as session:
        run = session.start_run()
        wrote = session.hop(first("a"), Generate(7), run, writes="a")
        reads = prompt("b", (None, ids(5, 2)), ("question", QUESTION), (None, ids(4, 3)), ("a", wrote.output_ids),
                       (None, ids(3, 6)))
        shared = session.hop(reads, Force((1, 2, 3)), run)
    dense = hop_after(first(), reads, "dense", "llama")
    assert len(wrote.output_ids) == 7
    assert shared.entries.reused == (len(QUESTION) + 7) * shared.layers
    assert torch.allclose(dense.logits, shared.logits, atol=2e-5), "same prefix: decode-time KV equals prefill KV"


def test_two_hops_from_one_stored_kv_give_equal_bits():
    results = []
    with Session(engine(), recipe("full-shared")) as session:
        run = session.start_run()
        session.hop(first(), Generate(1), run)
        kept = run.get(first().segments[1])
        for _ in range(2):
            again = RunStore()
            again.put(first().segments[1], kept)
            results.append(session.hop(second(), Force((1, 2)), again))
    assert torch.equal(results[0].logits, results[1].logits)


def test_references_are_handed_only_what_they_keep():
    assert Keep.REUSED_READS in Chained().keeps
    with Session(engine(), recipe("dense")) as session:
        run = session.start_run()
        session.hop(first(), Generate(3), run, writes="a")
        assert run.nbytes == 0
