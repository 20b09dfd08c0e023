"""Memory: budget and eviction, round trips, and every way a file can be wrong."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvbaton.errors import BudgetExceeded, InvariantError, StoreError, UsageError
from kvbaton.kv import Geometry
from kvbaton.memory import Memory, ModelIdentity, check_file, describe
from kvbaton.prompt import Edge
from toys import GEOMETRY, MeanOffset, SumState, kv, shifted

IDENTITY = ModelIdentity("tiny", "f00d", "rope0")
SMALL = MeanOffset().new_state(GEOMETRY).nbytes


def edge(i: int) -> Edge:
    return Edge("question", "solver", f"reader{i}")


def teach(memory: Memory, i: int, seed: int = 0) -> None:
    source = kv(5, seed)
    memory.learn(edge(i), source, shifted(source, kv(5, seed + 1)))


def filled(edges: int = 3) -> Memory:
    memory = Memory(MeanOffset(), GEOMETRY)
    for i in range(edges):
        teach(memory, i, seed=10 * i)
    return memory


def test_learns_by_edge() -> None:
    memory = filled(2)
    assert memory.edges() == (edge(0), edge(1))
    assert memory.state(edge(7)) is None
    assert memory.nbytes == 2 * SMALL
    memory.forget(edge(0))
    memory.forget(edge(0))
    assert memory.edges() == (edge(1),)
    memory.check()


def test_drops_the_edge_used_longest_ago(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(MeanOffset(), GEOMETRY, budget_bytes=2 * SMALL)
    with caplog.at_level("INFO", "kvbaton.memory"):
        teach(memory, 0)
        teach(memory, 1)
        assert memory.state(edge(0)) is not None
        teach(memory, 2)
    assert memory.edges() == (edge(0), edge(2))
    assert list(memory.evicted) == [edge(1)]
    assert "evicted question: solver -> reader1" in caplog.text
    memory.check()


def test_one_edge_over_the_budget_is_an_error_and_is_forgotten() -> None:
    memory = Memory(MeanOffset(), GEOMETRY, budget_bytes=SMALL - 1)
    with pytest.raises(BudgetExceeded, match=f"needs {SMALL} bytes, the budget is {SMALL - 1}"):
        teach(memory, 0)
    assert memory.edges() == ()
    memory.check()


@settings(max_examples=50, deadline=None)
@given(budget=st.integers(1, 4), uses=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_budget_and_order_match_a_plain_list(budget: int, uses: list[tuple[bool, int]]) -> None:
    memory, plain = Memory(MeanOffset(), GEOMETRY, budget * SMALL), list[int]()
    for learns, i in uses:
        if learns:
            teach(memory, i)
            plain = [*(p for p in plain if p != i), i][-budget:]
        elif (memory.state(edge(i)) is not None) and i in plain:
            plain = [*(p for p in plain if p != i), i]
        assert memory.edges() == tuple(map(edge, plain))
        memory.check()


def test_merge_equals_learning_in_one_place() -> None:
    left, right, both = (Memory(MeanOffset(), GEOMETRY) for _ in range(3))
    for memory, ids in ((left, (0, 1)), (right, (1, 2)), (both, (0, 1, 1, 2))):
        for i in ids:
            teach(memory, i, seed=i)
    left.merge(right)
    assert set(left.edges()) == set(both.edges())
    for name in both.edges():
        ours, wanted = left.state(name), both.state(name)
        assert isinstance(ours, SumState)
        assert isinstance(wanted, SumState)
        assert ours.texts == wanted.texts
        torch.testing.assert_close(ours.total, wanted.total)
    right_state = right.state(edge(2))
    assert right_state is not left.state(edge(2))
    with pytest.raises(UsageError, match="different correctors"):
        left.merge(Memory(MeanOffset(padding=1), GEOMETRY))


def test_learning_in_threads_loses_nothing() -> None:
    memory = Memory(MeanOffset(), GEOMETRY)
    threads = [threading.Thread(target=lambda: [teach(memory, i % 3) for i in range(30)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [memory.state(edge(i)).texts for i in range(3)] == [40, 40, 40]  # type: ignore[union-attr]


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(InvariantError, match="cannot learn"):
        Memory(MeanOffset(), GEOMETRY).learn(edge(0), kv(5, 0), kv(4, 0))
    with pytest.raises(UsageError, match="budget_bytes"):
        Memory(MeanOffset(), GEOMETRY, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_bit_equal(tmp_path: Path, dtype: torch.dtype) -> None:
    geometry = Geometry(3, 2, 4, dtype)
    memory = Memory(MeanOffset(padding=3), geometry)
    for i in range(3):
        source = kv(4 + i, i, geometry)
        memory.learn(edge(i), source, shifted(source, kv(4 + i, 9, geometry)))
    memory.state(edge(0))
    path = tmp_path / "new" / "memory.safetensors"
    memory.save(path, IDENTITY)
    memory.save(path, IDENTITY)
    loaded = Memory.load(path, MeanOffset(padding=3), geometry, IDENTITY)
    assert loaded.edges() == memory.edges() == (edge(1), edge(2), edge(0))
    for name in loaded.edges():
        ours, theirs = memory.state(name), loaded.state(name)
        assert ours is not None
        assert theirs is not None
        for key, tensor in ours.to_tensors().items():
            assert tensor.dtype == theirs.to_tensors()[key].dtype
            assert torch.equal(tensor, theirs.to_tensors()[key])
    assert [p.name for p in path.parent.iterdir()] == [path.name], "a scratch file was left behind"
    loaded.check()


def test_describe_and_check_need_no_model(tmp_path: Path) -> None:
    filled().save(tmp_path / "m", IDENTITY)
    manifest = describe(tmp_path / "m")
    assert manifest == check_file(tmp_path / "m")
    assert manifest.identity == IDENTITY
    assert manifest.geometry == GEOMETRY
    assert manifest.corrector.endswith("MeanOffset")
    assert manifest.settings == {"padding": 0}
    assert [r.edge for r in manifest.edges] == [edge(0), edge(1), edge(2)]
    assert manifest.nbytes == 3 * SMALL
    assert "torch" in manifest.versions


@pytest.mark.parametrize(("change", "says"), [
    ({"identity": ModelIdentity("tiny", "beef", "rope0")}, "model fingerprint is 'f00d' in the file and 'beef' here"),
    ({"identity": ModelIdentity("tiny", "f00d", "rope1")}, "model rope is 'rope0' in the file and 'rope1' here"),
    ({"identity": ModelIdentity("other", "f00d", "rope0")}, "model name is 'tiny' in the file and 'other' here"),
    ({"geometry": Geometry(3, 2, 4, torch.bfloat16)}, r"geometry dtype is torch.float32 .* torch.bfloat16 here"),
    ({"geometry": Geometry(4, 2, 4, torch.float32)}, "geometry layers is 3 in the file and 4 here"),
    ({"corrector": MeanOffset(padding=2)}, "corrector setting padding is 0 in the file and 2 here"),
])
def test_a_mismatch_names_the_field_and_both_values(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    filled().save(tmp_path / "m", IDENTITY)
    ours = {"corrector": MeanOffset(), "geometry": GEOMETRY, "identity": IDENTITY} | change
    with pytest.raises(StoreError, match=says):
        Memory.load(tmp_path / "m", **ours)


def test_load_keeps_to_the_budget(tmp_path: Path) -> None:
    filled(3).save(tmp_path / "m", IDENTITY)
    loaded = Memory.load(tmp_path / "m", MeanOffset(), GEOMETRY, IDENTITY, budget_bytes=2 * SMALL)
    assert loaded.edges() == (edge(1), edge(2))


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(1).save(tmp_path / "m", IDENTITY)
    before = (tmp_path / "m").read_bytes()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(StoreError, match="no space left"):
        filled(3).save(tmp_path / "m", IDENTITY)
    assert (tmp_path / "m").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    with pytest.raises(StoreError, match="is a folder"):
        filled(1).save(tmp_path, IDENTITY)


def rewrite(path: Path, change: Any) -> None:
    """Save ``path`` again after ``change(tensors, manifest)``."""
    blob = path.read_bytes()
    header = json.loads(blob[8:8 + struct.unpack("<Q", blob[:8])[0]])
    manifest, tensors = json.loads(header["__metadata__"]["kvbaton"]), load_file(path)
    manifest = change(tensors, manifest) or manifest
    save_file(tensors, path, metadata={"kvbaton": manifest if isinstance(manifest, str) else json.dumps(manifest)})


def set_edge(key: str, value: object, record: bool = False) -> Any:
    def change(_: Any, manifest: Any) -> None:
        target = manifest["edges"][0] if record else manifest["edges"][0]["edge"]
        target[key] = value
    return change


HOSTILE = {
    "missing tensor": (lambda t, m: t.__delitem__("0.total"), "'0.total' is missing"),
    "extra tensor": (lambda t, m: t.update({"0.more": torch.zeros(1)}), "'0.more' is not in the manifest"),
    "not finite": (lambda t, m: t.update({"1.total": t["1.total"] * float("nan")}), "reader1: total has values"),
    "infinite": (lambda t, m: t.update({"1.total": t["1.total"] + float("inf")}), "not finite"),
    "wrong shape": (lambda t, m: t.update({"0.total": torch.zeros(3)}), "wrong shape"),
    "edge twice": (lambda t, m: m["edges"].__setitem__(1, m["edges"][0]), "edge twice"),
    "edge unnamed": (set_edge("reader", None), "no valid 'reader'"),
    "edge endless": (set_edge("share", "x" * 5000), "no valid 'share'"),
    "slot negative": (set_edge("slot", -1), "no valid 'slot'"),
    "slot a bool": (set_edge("slot", True), "no valid 'slot'"),
    "tensor traversal": (set_edge("tensors", ["../../etc/passwd"], record=True), "not allowed"),
    "tensor twice": (set_edge("tensors", ["seen", "seen"], record=True), "twice"),
    "texts off": (set_edge("texts", 99, record=True), "the manifest says 99 texts"),
    "bytes off": (set_edge("nbytes", 1, record=True), "1 bytes"),
    "new format": (lambda t, m: m.update(format=2), "format is 2"),
    "odd dtype": (lambda t, m: m["geometry"].update(dtype="load"), "unknown dtype 'load'"),
    "no geometry": (lambda t, m: m.__delitem__("geometry"), "no valid 'geometry'"),
    "a list": (lambda t, m: "[]", "no valid 'format'"),
    "not JSON": (lambda t, m: "{", "not JSON"),
    "deep JSON": (lambda t, m: "[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests_are_refused(tmp_path: Path, case: str) -> None:
    change, says = HOSTILE[case]
    path = tmp_path / "m"
    filled().save(path, IDENTITY)
    rewrite(path, change)
    with pytest.raises(StoreError, match=says):
        Memory.load(path, MeanOffset(), GEOMETRY, IDENTITY)


def test_files_that_are_no_memory_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with pytest.raises(StoreError, match="does not exist"):
        describe(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(StoreError, match="not written by KVBaton"):
        describe(path)
    with pytest.raises(StoreError):
        describe(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(StoreError, match="not a whole safetensors file"):
        check_file(path)
    torch.save({"x": 1}, path)
    with pytest.raises(StoreError):
        check_file(path)
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(StoreError):
        check_file(path)


@pytest.mark.parametrize("seed", range(60))
def test_damaged_files_are_refused_or_still_sound(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "m", random.Random(seed)
    filled().save(path, IDENTITY)
    blob = bytearray(path.read_bytes())
    if seed % 2:
        blob = blob[:rng.randrange(len(blob))]
    else:
        for _ in range(3):
            blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(blob))
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(StoreError) if seed % 2 else contextlib.suppress(StoreError))
        Memory.load(path, MeanOffset(), GEOMETRY, IDENTITY).check()
