"""Q1, Q3, Q4, Q5 and G1: quantised KV and head layout. (Q2 is about vLLM's block pool and is tested with it.)

KVBaton stores KV in the model's own float type. Other types are refused by name, so no scale can be lost and no
quantised key is ever turned in place.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hops import ANSWER, dense, run, same
from kvbaton.correctors.residuals import Residuals
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.models import load
from kvbaton.engine.session import Session
from kvbaton.errors import StoreError, Unsupported, UsageError
from kvbaton.memory import Memory
from kvbaton.recipes import recipe
from kvbaton.rope import Rope
from tiny import build, engine, ids, prompt

QUESTION = ("question", ids(23, 1))
SOURCE = prompt("solver", (None, ids(5, 2)), QUESTION, (None, ids(4, 3)))
READER = prompt("critic", (None, ids(9, 4)), QUESTION, (None, ids(6, 5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q1_what_was_learned_comes_back_bit_equal_in_a_fresh_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny, method, file = engine("llama", dtype), recipe("graphflow"), tmp_path / "memory.kvb"
    with Session(tiny, method) as session:
        for _ in range(4):
            store = session.start_run()
            for asked in (SOURCE, READER):
                before = session.hop(asked, ANSWER, store)
        session.memory.save(file, tiny.identity)
    assert not before.dense
    memory = Memory.load(file, method.corrector, tiny.geometry, tiny.identity)
    with Session(tiny, method, memory=memory, prefix_cache=False) as fresh, \
            Session(tiny, method, memory=session.memory, prefix_cache=False) as old:
        results = []
        for each in (fresh, old):
            store = each.start_run()
            each.hop(SOURCE, ANSWER, store)
            results.append(each.hop(READER, ANSWER, store))
    assert torch.equal(results[0].logits, results[1].logits)


def test_q1_a_memory_of_another_dtype_is_refused(tmp_path: Path) -> None:
    corrector, file = Residuals(), tmp_path / "memory.kvb"
    Memory(corrector, engine("llama").geometry).save(file, engine("llama").identity)
    half = engine("llama", torch.bfloat16)
    with pytest.raises(StoreError, match="dtype"):
        Memory.load(file, corrector, half.geometry, engine("llama").identity)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "q4_0"])
def test_q3_q4_other_types_than_float_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(UsageError, match="float32"):
        load("smollm2", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float64])
def test_q3_q4_a_model_of_another_type_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(Unsupported, match=str(dtype).removeprefix("torch.")):
        HFEngine(build("llama", dtype=dtype))


def test_q5_moved_keys_are_the_models_own_and_unmoved_keys_are_not() -> None:
    """A patch elsewhere called re-rotation unnecessary: on one layer, where reuse is exact, skipping it is wrong."""
    rope: Rope = engine("llama").rope
    key = torch.randn(2, 23, rope.head_dim, generator=torch.Generator().manual_seed(0))
    there, here = torch.arange(5, 28), torch.arange(69, 92)
    at_source = Rope.rotate(key, *rope.angles(there, 0))
    moved = Rope.rotate(Rope.unrotate(at_source, *rope.angles(there, 0)), *rope.angles(here, 0))
    right = Rope.rotate(key, *rope.angles(here, 0))
    torch.testing.assert_close(moved, right, rtol=1e-5, atol=1e-5)
    assert float((at_source - right).norm() / right.norm()) > 0.1


@pytest.mark.parametrize(("family", "heads"), [("llama-mqa", 1), ("llama", 2), ("llama3-rope", 4), ("llama-mha", 8)])
def test_g1_kv_of_1_2_4_and_8_heads_makes_the_round_trip(family: str, heads: int) -> None:
    tiny = engine(family)
    assert tiny.geometry.kv_heads == heads
    reader = prompt("critic", (None, ids(5, 2)), QUESTION, (None, ids(6, 5)))
    _, shared = run(tiny, "full-shared", SOURCE, reader)
    assert shared.entries.reused == 23 * shared.layers
    assert same(shared, dense(tiny, reader))
