"""W1 to W3: sliding windows and hybrid models, on the Hugging Face engine. (Their block pools are vLLM's.)"""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from hops import dense, run, same
from kvbaton.engine.hf import HFEngine
from kvbaton.errors import Unsupported
from tiny import engine, ids, prompt

QUESTION = ("question", ids(40, 1))
MIXED = ["mistral-window", "gemma2", "gemma3"]


@pytest.mark.parametrize("family", MIXED)
def test_w1_each_layer_keeps_its_own_window(family: str) -> None:
    """The text is three windows long: a global layer that lost its old tokens would differ from dense."""
    source = prompt("solver", (None, ids(5, 2)), QUESTION, (None, ids(4, 3)))
    reader = prompt("critic", (None, ids(5, 2)), QUESTION, (None, ids(16, 5)))
    _, shared = run(engine(family), "full-shared", source, reader)
    assert shared.entries.reused == 40 * shared.layers
    assert same(shared, dense(engine(family), reader))


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("method", ["dense", "full-shared", "cacheblend"])
def test_w2_the_same_prompt_four_times_gives_the_same_answer(family: str, method: str) -> None:
    source = prompt("solver", (None, ids(14, 2)), QUESTION, (None, ids(4, 3)))
    reader = prompt("critic", (None, ids(15, 4)), QUESTION, (None, ids(16, 5)))
    answers = [run(engine(family), method, source, reader)[1] for _ in range(4)]
    assert all(torch.equal(answers[0].logits, other.logits) for other in answers[1:])


@pytest.mark.parametrize("family", MIXED)
def test_w3_an_edit_at_the_end_loses_no_reuse(family: str) -> None:
    source = prompt("solver", (None, ids(5, 2)), QUESTION, (None, ids(4, 3)))
    for tail in (1, 3, 13):
        edited = prompt("critic", (None, ids(5, 2)), QUESTION, (None, ids(tail, 60 + tail)))
        _, shared = run(engine(family), "full-shared", source, edited)
        assert shared.entries.reused == 40 * shared.layers
        assert same(shared, dense(engine(family), edited))


def test_w3_models_with_state_instead_of_kv_are_refused() -> None:
    config = tf.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=2)
    with pytest.raises(Unsupported):
        HFEngine(tf.MambaForCausalLM(config))
