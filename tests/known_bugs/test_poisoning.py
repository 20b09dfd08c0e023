"""P1 to P7: poisoned, foreign or stale KV. (Block pools, block hashes and load failures are tested with vLLM.)"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers as tf

from hops import ANSWER, dense, run, same
from kvbaton.engine.cache import PrefixCache
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.session import Session
from kvbaton.errors import StoreError, Unsupported
from kvbaton.kv import KV
from kvbaton.memory import Memory
from kvbaton.prompt import Segment
from kvbaton.recipes import Recipe, recipe
from kvbaton.references import Chained, RunStore
from tiny import build, engine, ids, prompt

QUESTION = ("question", ids(23, 1))
SOURCE = prompt("solver", (None, ids(5, 2)), QUESTION, (None, ids(4, 3)))
READER = prompt("critic", (None, ids(9, 4)), QUESTION, (None, ids(6, 5)))


@dataclass(frozen=True)
class Failing(Chained):
    """A reference whose look-ups fail."""

    asked: list[Segment] = field(default_factory=list, compare=False)

    def resolve(self, segment: Segment, run: RunStore) -> KV | None:
        self.asked.append(segment)
        return None


def test_p1_what_could_not_be_loaded_is_recomputed() -> None:
    reference = Failing()
    _, hop = run(engine(), Recipe("failing", "", "", reference), SOURCE, READER)
    assert len(reference.asked) == 2
    assert [d.action for d in hop.decisions] == ["recompute"]
    assert same(hop, dense(engine(), READER))


def test_p2_a_memory_of_another_model_or_rope_is_refused(tmp_path: Path) -> None:
    method, file = recipe("graphflow"), tmp_path / "memory.kvb"
    Memory(method.corrector, engine().geometry).save(file, engine().identity)
    for other in (HFEngine(build("llama", seed=1)), engine("llama-linear")):
        with pytest.raises(StoreError):
            Memory.load(file, method.corrector, other.geometry, other.identity)


def test_p2_equal_ids_of_another_share_are_another_text() -> None:
    store = RunStore()
    held = KV(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0, "solver", True)
    store.put(Segment((1, 2), "question"), held)
    assert store.get(Segment((1, 2), "question")) is not None
    assert store.get(Segment((1, 2), "solver")) is None
    assert store.get(Segment((1, 2), "question@-1")) is not None, "a text of the round before is the same owner's"


def test_p3_models_whose_placeholder_ids_stand_for_images_are_refused() -> None:
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    with pytest.raises(Unsupported):
        HFEngine(tf.Qwen2_5_VLForConditionalGeneration(config))


def test_p4_eviction_churn_brings_no_foreign_text() -> None:
    """A prefix cache with room for one role prompt, many roles in turn, each asked again."""
    tiny = engine()
    readers = [prompt(f"agent{i}", (None, ids(9, 100 + i)), QUESTION, (None, ids(3, 5))) for i in range(6)]
    truth = [dense(tiny, reader) for reader in readers]
    with Session(tiny, recipe("dense")) as session:
        session._prefixes = PrefixCache(budget_bytes=tiny.geometry.nbytes(9))
        for turn in (0, 1, 2, 2, 3, 4, 5, 0, 1, 5, 5):
            hop = session.hop(readers[turn], ANSWER, session.start_run())
            assert same(hop, truth[turn])
            assert session._prefixes.nbytes <= tiny.geometry.nbytes(9)
    assert hop.entries.cached > 0


def test_p5_equal_hashes_do_not_make_equal_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "key", "0" * 32)
    monkeypatch.setattr(Segment, "__hash__", lambda self: 7)
    other = prompt("critic", (None, ids(9, 4)), ("question", ids(23, 66)), (None, ids(6, 5)))
    assert other.segments[1].key == SOURCE.segments[1].key
    _, hop = run(engine(), "full-shared", SOURCE, other)
    assert hop.dense
    assert same(hop, dense(engine(), other))


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral-window", "gemma3", "llama-yarn"])
def test_p6_a_hit_gives_what_a_miss_gives(family: str) -> None:
    tiny = engine(family)
    with Session(tiny, recipe("dense")) as session:
        miss, hit = (session.hop(READER, ANSWER, session.start_run()) for _ in range(2))
    assert (miss.entries.cached, hit.entries.cached) == (0, 9 * hit.layers)
    assert same(miss, hit, atol=1e-4)
    reader = prompt("critic", (None, ids(5, 2)), QUESTION, (None, ids(6, 5)))
    assert same(run(tiny, "full-shared", SOURCE, reader)[1], dense(tiny, reader))


def test_p7_approximate_kv_never_serves_an_exact_request() -> None:
    """After a reuse run, the same ids as an agent's own text: the prefix cache may not hold what was reused."""
    own = prompt("critic", (None, READER.token_ids[:-2]), ("notes", READER.token_ids[-2:]))
    with Session(engine(), recipe("full-shared")) as session:
        store = session.start_run()
        session.hop(SOURCE, ANSWER, store)
        assert not session.hop(READER, ANSWER, store).dense
        exact = session.hop(own, ANSWER, session.start_run())
    assert exact.entries.cached == 0
    assert same(exact, dense(engine(), own))


def test_p7_what_was_reused_is_marked_inexact_and_teaches_nothing() -> None:
    with Session(engine(), recipe("full-shared")) as session:
        store = session.start_run()
        session.hop(SOURCE, ANSWER, store)
        assert store.get(SOURCE.segments[1]).exact
        session.hop(READER, ANSWER, store)
        assert not store.get(SOURCE.segments[1]).exact
