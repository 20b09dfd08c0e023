"""What is refused at start, with a reason, and what every head layout and cache type gives back."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed: run `make vllm-test`")

import torch
from engines import running, save_model
from scenario import tokens

from kvbaton.errors import MissingExtra, Unsupported

ROLE, TEXT = tokens(1, 40), tokens(2, 100)


@pytest.mark.parametrize(("kv_heads", "dtype", "tolerance"), [
    (1, "float32", 2e-5), (4, "float32", 2e-5), (8, "float32", 2e-5), (2, "bfloat16", 0.1), (2, "float16", 0.02)])
def test_head_layouts_and_cache_types(tmp_path, kv_heads, dtype, tolerance) -> None:
    """G1: packed K and V read as another layout corrupt silently. In the same context reuse must be exact."""
    model = save_model(str(tmp_path), kv_heads, getattr(torch, dtype))
    with running(model, {"method": "full-shared"}, dtype=dtype, enable_prefix_caching=False) as engine:
        engine.ask(ROLE + TEXT + tokens(3, 9), {"agent": "a", "spans": [[40, 140, "q"]]})
        exact = engine.ask(ROLE + TEXT + tokens(4, 9))
        served = engine.ask(ROLE + TEXT + tokens(4, 9), {"agent": "b", "spans": [[40, 140, "q"]]})
        assert served.params["loaded_tokens"] == 100
        assert served.difference(exact) < tolerance


def mistral(path: str) -> str:
    from transformers import MistralConfig, MistralForCausalLM

    MistralForCausalLM(MistralConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, sliding_window=64)).save_pretrained(path)
    return path


def test_sliding_windows_are_refused(tmp_path) -> None:
    """W1, W3: a window's cache forgets rows."""
    with pytest.raises(Unsupported, match="sliding-window"), running(mistral(str(tmp_path)), {"method": "full-shared"}):
        pass


@pytest.mark.parametrize(("config", "why"), [
    ({"kv_cache_dtype": "fp8_e5m2"}, "quantised KV cache")])
def test_quantised_caches_are_refused(tmp_path, config, why) -> None:
    """Q2, Q4: fp8 and int8 caches."""
    with pytest.raises(Unsupported, match=why), running(save_model(str(tmp_path)), {"method": "full-shared"}, **config):
        pass


def test_dynamic_rope_is_refused(tmp_path) -> None:
    """R1: a rotation that stored keys cannot follow."""
    model = save_model(str(tmp_path), rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(Unsupported, match="dynamic NTK"), running(model, {"method": "full-shared"}):
        pass


def test_scaled_rope_moves_right(tmp_path) -> None:
    """R1, R2: llama3 scaling at a shift of thousands of positions; layer-0 keys tell a wrong rotation at once."""
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    model = save_model(str(tmp_path), rope_parameters=scaling)
    with running(model, {"method": "full-shared"}, max_model_len=8000) as engine:
        held = []
        for front in (ROLE, tokens(5, 4000)):
            span = [len(front), len(front) + 100, "q"]
            engine.ask(front + TEXT + tokens(6, 9), {"agent": "reader", "spans": [span], "reuse": False})
            engine.settle()
            held.append(next(kv for kv in engine.worker.texts.values() if len(kv) == 100))
        near, far = (kv.k[0] for kv in held)
        assert [kv.start for kv in held] == [40, 4000]
        assert float((near - far).norm() / near.norm()) < 1e-3


def test_another_scheduler_without_the_connector_is_refused(tmp_path) -> None:
    with pytest.raises(Unsupported, match="GapJumpScheduler works with the KVBaton connector"), \
            running(save_model(str(tmp_path)), None, scheduler_cls="kvbaton.vllm.jumping.GapJumpScheduler"):
        pass


def test_other_versions_are_refused(monkeypatch) -> None:
    import kvbaton.vllm as plugin

    for found in ("0.31.4", "0.33.0", "1.0"):
        monkeypatch.setattr(plugin, "version", lambda name, found=found: found)
        with pytest.raises(Unsupported, match=rf"works with vllm 0.32.x, found {found}"):
            plugin.check_version()
    monkeypatch.setattr(plugin, "version", lambda name: "0.32.7+cpu")
    plugin.check_version()

    def absent(name: str) -> str:
        raise plugin.PackageNotFoundError(name)

    monkeypatch.setattr(plugin, "version", absent)
    with pytest.raises(MissingExtra, match="requirements/vllm.txt"):
        plugin.check_version()


def test_the_plugin_registers_once() -> None:
    from importlib.metadata import entry_points

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    (point,) = entry_points(group="vllm.general_plugins", name="kvbaton")
    point.load()()
    point.load()()
    assert KVConnectorFactory.get_connector_class_by_name("KVBaton").__name__ == "KVBatonConnector"
