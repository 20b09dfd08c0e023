"""`bench single` on a tiny shape: what is timed, counted and interleaved. No wall time is asserted."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvbaton.bench import shapes
from kvbaton.bench.ceiling import Machine, measure_machine, prefill_work
from kvbaton.bench.memory_use import PeakMemory
from kvbaton.bench.single import FullLength, Point, Speed, Stream, measure
from kvbaton.bench.speed_table import COLUMNS, cells, lines
from kvbaton.bench.variants import vary
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.session import Session
from kvbaton.errors import UnknownName, UsageError
from kvbaton.recipes import recipe

POINT = Point(shared=40, agents=3, role=8, private=10, glue=2, output=3)
MACHINE = Machine(1e10, 1e11)


@cache
def engine() -> HFEngine:
    return shapes.build("tiny", torch.float32, torch.device("cpu"))


def records(methods: tuple[str, ...] = ("dense", "full-shared", "graphflow-bare"), repeats: int = 2, done: object = ()):  # type: ignore[no-untyped-def]
    speed = Speed((POINT,), tuple(recipe(m) for m in methods), repeats, 1, 0)
    return list(measure(engine(), speed, MACHINE, done))  # type: ignore[arg-type]


def test_every_hop_is_charged_and_methods_take_turns() -> None:
    found = records()
    names = ["dense", "full-shared", "graphflow-bare"]
    assert [r["method"] for r in found] == [*names, *names[1:], names[0]]
    for record in found:
        assert [h["handed"] for h in record["hops"]] == [0, 2, 3]
        assert [h["output_tokens"] for h in record["hops"]] == [3, 3, 3]
        assert all(sum(h["entries"].values()) == h["prompt_tokens"] * h["layers"] for h in record["hops"])
        assert record["peak_process_bytes"] > 0
        last = record["hops"][-1]
        assert last["reuse"] == (0 if record["method"] == "dense" else 1)
        assert last["prompt_tokens"] == 8 + 40 + 10 + 2 * (2 + 3) + 2
        assert last["shared_tokens"] == 40 + 2 * 3


def test_what_is_done_is_left_out() -> None:
    done = {(POINT.name, "dense", 0), (POINT.name, "full-shared", 0)}
    assert [(r["method"], r["repeat"]) for r in records(("dense", "full-shared"), 1, done)] == []
    assert len(records(("dense", "full-shared"), 2, done)) == 2


def test_a_method_that_learns_is_timed_in_reuse_even_if_its_gate_says_no() -> None:
    found = records(("dense", "graphflow"), 1)
    last = next(r for r in found if r["method"] == "graphflow")["hops"][-1]
    assert not last["dense"]
    assert last["gate_said_no"] == 3


def test_rounds_hand_on_the_latest_answers() -> None:
    point = Point(shared=12, agents=2, rounds=2, role=4, private=4, glue=2, output=2)
    with Session(engine(), recipe("full-shared")) as session:
        hops = Stream(engine(), point, 0).run(session, 0)
    assert [handed for _, handed in hops] == [0, 2, 2, 2]
    assert [hop.shared_tokens for hop, _ in hops] == [12, 14, 14, 14]


def test_the_same_seed_gives_the_same_texts() -> None:
    with Session(engine(), recipe("dense")) as session:
        a, b, c = (Stream(engine(), POINT, seed).run(session, 0) for seed in (0, 0, 1))
    assert [h.output_ids for h, _ in a] == [h.output_ids for h, _ in b] != [h.output_ids for h, _ in c]


def test_stop_tokens_are_barred() -> None:
    logits = torch.tensor([0.0, 5.0, 1.0])
    assert FullLength((1,)).begin().pick(logits) == 2
    assert FullLength(()).begin().pick(logits) == 1
    assert logits[1] == 5


def test_the_ceiling_counts_bytes_and_flops() -> None:
    e = engine()
    layer = sum(p.numel() for p in e.layers[0].parameters())
    head = 512 * 64
    work = prefill_work(e, prompt_tokens=100, computed_tokens=0, moved_bytes=10)
    assert work.bytes == (2 * layer + head) * 4 + 20 + 2 * 2 * 2 * 16 * 100 * 4
    assert work.flops == 2 * head
    dense = prefill_work(e, 100, 100, 0)
    assert dense.flops == 2 * 2 * layer * 100 + 2 * head + 4 * 2 * 64 * 100 * 50
    assert work.ceiling_s(MACHINE) == max(work.bytes / 1e10, work.flops / 1e11)
    assert work.bandwidth_utilisation(MACHINE, work.bytes / 1e10) == pytest.approx(1)
    assert work.flop_utilisation(MACHINE, work.flops / 1e11) == pytest.approx(1)


def test_the_machine_is_measured() -> None:
    machine = measure_machine(torch.device("cpu"), torch.float32, tries=1)
    assert machine.bytes_per_s > 0
    assert machine.flops_per_s > 0


def test_peak_memory_sees_an_allocation_and_forgets_the_last_one() -> None:
    with PeakMemory(torch.device("cpu")) as big:
        x = torch.ones(30_000_000)
        del x
    with PeakMemory(torch.device("cpu")) as small:
        pass
    assert big.process_bytes - small.process_bytes > 60e6
    assert big.torch_bytes is None


def test_the_table_has_a_line_a_method() -> None:
    found = lines(records())
    assert [(x.method, x.repeats) for x in found] == [("dense", 2), ("full-shared", 2), ("graphflow-bare", 2)]
    assert found[0].speed_up == 1
    assert found[2].learned_bytes > 0
    assert all(len(cells(x)) == len(COLUMNS) for x in found)


def test_variants() -> None:
    got = vary([recipe("dense"), recipe("cacheblend")], "selector.share=0.1, 0.2")
    assert [r.name for r in got] == ["dense", "cacheblend[selector.share=0.1]", "cacheblend[selector.share=0.2]"]
    assert got[2].selector.share == 0.2  # type: ignore[attr-defined]
    with pytest.raises(UnknownName, match=r"selector\.share"):
        vary([recipe("cacheblend")], "selector.shar=1")
    with pytest.raises(UsageError, match="a,b,c"):
        vary([recipe("cacheblend")], "selector.share")


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shapes_are_real_configs(name: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**shapes.SHAPES[name])
    assert config.hidden_size % config.num_attention_heads == 0
    assert config.num_attention_heads % config.num_key_value_heads == 0


def test_bad_points_and_shapes() -> None:
    with pytest.raises(UsageError):
        Point(shared=0)
    with pytest.raises(UsageError):
        Point(shared=1, agents=1)
    with pytest.raises(UnknownName, match=r"llama-3\.1-8b"):
        shapes.build("llama-3.1-8", torch.float32, torch.device("cpu"))
