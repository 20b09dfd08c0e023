"""R1 to R10: positions and rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from hops import dense, run, same
from kvbaton.engine.attention import QueryRows
from kvbaton.engine.hf import HFEngine, Watch
from kvbaton.engine.sampling import Force
from kvbaton.engine.session import Session
from kvbaton.errors import Unsupported
from kvbaton.recipes import recipe
from kvbaton.rope import Rope
from tiny import build, engine, ids, prompt

QUESTION = ("question", ids(23, 1))
SOURCE = prompt("solver", (None, ids(5, 2)), QUESTION, (None, ids(4, 3)))
SCALED = ["llama3-rope", "llama-yarn", "llama-linear"]


def one_layer(family: str) -> HFEngine:
    """Layer 0 depends on token and position alone: reuse must be exact whatever stands before a text."""
    return HFEngine(build(family, num_hidden_layers=1))


def key_error(rope: Rope, frequencies: torch.Tensor, shift: int) -> float:
    """Relative error of keys turned by ``frequencies`` instead of the model's own, at ``shift``."""
    key, at = torch.randn(1, 64, rope.head_dim, generator=torch.Generator().manual_seed(0)), torch.full((64,), shift)
    right = Rope.rotate(key, *rope.angles(at, 0))
    angles = at[:, None].float() * frequencies
    wrong = Rope.rotate(key, angles.cos() * rope.bands[0].scaling, angles.sin() * rope.bands[0].scaling)
    return float((wrong - right).norm() / right.norm())


@pytest.mark.parametrize("family", SCALED)
def test_r1_scaled_rope_is_reused_not_refused(family: str) -> None:
    reader = prompt("critic", (None, ids(150, 4)), QUESTION, (None, ids(6, 5)))
    tiny = one_layer(family)
    _, shared = run(tiny, "full-shared", SOURCE, reader)
    assert shared.entries.reused == len(QUESTION[1])
    assert same(shared, dense(tiny, reader))


def test_r1_rope_that_cannot_be_moved_is_refused_by_name() -> None:
    config = tf.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                            num_attention_heads=2,
                            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(Unsupported, match="dynamic NTK"):
        HFEngine(tf.LlamaForCausalLM(config))


def test_r2_llama3_keys_move_by_the_scaled_frequencies() -> None:
    rope = engine("llama3-rope").rope
    plain = 10000.0 ** (-torch.arange(0, rope.head_dim, 2).float() / rope.head_dim)
    assert key_error(rope, rope.bands[0].inv_freq, 4096) < 1e-5
    assert key_error(rope, plain, 4096) > 0.1, "plain frequencies must be seen to fail, or this test shows nothing"


def test_r3_every_fragment_of_a_merged_prompt_is_moved_not_only_the_first() -> None:
    parts = [("question", ids(11, 20)), ("notes", ids(7, 21)), ("plan", ids(13, 22))]
    source = prompt("solver", (None, ids(5, 2)), *parts, (None, ids(4, 3)))
    reader = prompt("critic", (None, ids(30, 4)), parts[2], (None, ids(3, 6)), parts[0], parts[1], (None, ids(6, 5)))
    tiny = one_layer("llama")
    _, shared = run(tiny, "full-shared", source, reader)
    assert shared.entries.reused == 31
    assert same(shared, dense(tiny, reader))


def test_r4_prompts_of_unequal_length_side_by_side_keep_their_phases() -> None:
    prompts = [prompt("critic", (None, ids(n, 30 + n)), QUESTION, (None, ids(3, 5))) for n in (2, 40, 9)]
    tiny = one_layer("llama")
    together = run(tiny, "full-shared", SOURCE, *prompts)[1:]
    assert all(same(hop, dense(tiny, p)) for hop, p in zip(together, prompts, strict=True))


def test_r5_rows_after_dropped_rows_keep_their_true_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    forward = HFEngine.forward

    def spy(self: HFEngine, cache: Any, token_ids: Any, rows: QueryRows, watch: Watch) -> Any:
        seen.append(rows.positions.tolist())
        out = forward(self, cache, token_ids, rows, watch)
        seen.append(out[0].positions.tolist())
        return out

    monkeypatch.setattr(HFEngine, "forward", spy)
    reader = prompt("critic", (None, ids(9, 4)), QUESTION, (None, ids(6, 5)))
    with Session(engine(), recipe("cacheblend")) as session:
        store = session.start_run()
        session.hop(SOURCE, Force((1,)), store)
        seen.clear()
        session.hop(reader, Force((1, 2, 3)), store)
    first, last, answer = seen[0], seen[1], seen[2]
    assert first == list(range(38))
    assert len(last) < len(first)
    assert last[-6:] == list(range(32, 38))
    assert answer == [38, 39, 40], "decode goes on at the true length, not at the number of rows kept"


def test_r6_64_shifts_are_as_good_as_one() -> None:
    tiny = HFEngine(build("llama", num_hidden_layers=1, dtype=torch.bfloat16))
    with Session(tiny, recipe("full-shared")) as session:
        store = session.start_run()
        session.hop(SOURCE, Force((1,)), store)
        for i in range(64):
            session.hop(prompt(f"agent{i}", (None, ids(2 + i, i)), QUESTION, (None, ids(3, 5))), Force((1,)), store)
        reader = prompt("judge", (None, ids(40, 4)), QUESTION, (None, ids(6, 5)))
        chained = session.hop(reader, Force((1, 2)), store)
    once = run(tiny, "full-shared", SOURCE, reader)[1]
    assert torch.equal(chained.logits[0], once.logits[0])


@pytest.mark.parametrize(("change", "says"), [
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}, "M-RoPE"), ({"kv_lora_rank": 8}, "MLA"),
])
def test_r7_mrope_and_mla_are_refused_by_name(change: dict[str, Any], says: str) -> None:
    model = build("llama")
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(Unsupported, match=says):
        HFEngine(model)


@pytest.mark.parametrize("method", ["full-shared", "cacheblend"])
def test_r8_reading_a_stored_cache_twice_does_not_rotate_it_twice(method: str) -> None:
    readers = [prompt(name, (None, ids(9, 4)), QUESTION, (None, ids(6, 5))) for name in ("critic", "judge", "critic")]
    with Session(engine(), recipe(method), prefix_cache=False) as session:
        results = []
        for reader in readers:
            store = session.start_run()
            session.hop(SOURCE, Force((1,)), store)
            held = store.get(SOURCE.segments[1])
            before = held.k.clone()
            results.append(session.hop(reader, Force((1, 2)), store))
            assert torch.equal(held.k, before)
    assert all(torch.equal(results[0].logits, other.logits) for other in results[1:])


@pytest.mark.parametrize("family", [*SCALED, "qwen2", "gemma3"])
def test_r9_decoded_keys_equal_prefilled_keys_of_the_same_ids(family: str) -> None:
    """Beyond 64 and 128 tokens, where scaled tables part from plain ones."""
    written = ids(12, 50)
    start = prompt("solver", (None, ids(140, 51)))
    with Session(engine(family), recipe("full-shared")) as session:
        store = session.start_run()
        session.hop(start, Force(written), store, writes="solver")
        decoded = store.get(prompt("x", ("solver", written)).segments[0])
        read = prompt("critic", (None, start.token_ids), ("solver", written), (None, ids(2, 52)))
        prefilled = Session(engine(family), recipe("full-shared"))
        other = prefilled.start_run()
        prefilled.hop(read, Force((1,)), other)
        held = other.get(read.segments[1])
    torch.testing.assert_close(decoded.k, held.k, rtol=0, atol=1e-4)
    torch.testing.assert_close(decoded.v, held.v, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", *SCALED])
def test_r10_reuse_without_moving_the_keys_is_seen_to_be_wrong(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = one_layer(family)
    reader = prompt("critic", (None, ids(60, 4)), QUESTION, (None, ids(6, 5)))
    truth = dense(tiny, reader)
    _, moved = run(tiny, "full-shared", SOURCE, reader)
    rotate_into = Rope.rotate_into

    def stay(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if x.shape[1] == len(QUESTION[1]):
            cos, sin = tiny.rope.angles(torch.arange(5, 28), 0)
        rotate_into(out, x, cos, sin)

    monkeypatch.setattr(Rope, "rotate_into", staticmethod(stay))
    _, unmoved = run(tiny, "full-shared", SOURCE, reader)
    assert same(moved, truth)
    assert not same(unmoved, truth, atol=1e-2)
