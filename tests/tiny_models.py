"""Tiny random models, built from a config: no weights, no network, the same every time."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvbaton.engine.hf import HFEngine

VOCAB, LAYERS = 96, 6
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}
FAMILIES = ("llama", "qwen2")


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> HFEngine:
    """A random model of ``family``. Weights are large enough for attention to tell keys apart."""
    torch.manual_seed(seed)
    kinds: dict[str, Any] = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    config, model = kinds[family]
    net = model(config(**{**_SHAPE, **changes}))
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if weight.ndim == 2:
                weight.mul_(6.0 if "_proj" in name else 20.0)
            elif name.endswith(".bias"):
                weight.normal_(0.0, 0.5)
    return HFEngine(net.to(dtype), name=f"tiny-{family}")
