"""Tiny random models of every supported family, built from a config: no weights, no network."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers as tf

from kvbaton.engine.hf import HFEngine
from kvbaton.prompt import Prompt, Segment
from toy_tokenizers import byte_level

VOCAB = 97
_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "attention_dropout": 0.0,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-mha": ("Llama", {"num_key_value_heads": 8}),
    "llama3-rope": ("Llama", {"num_key_value_heads": 4, "rope_parameters": _LLAMA3}),
    "llama-yarn": ("Llama", {"num_key_value_heads": 2, "rope_parameters": _YARN}),
    "llama-linear": ("Llama", {"num_key_value_heads": 2, "rope_parameters": _LINEAR}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 16}),
    "mistral-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 12}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16,
                          "layer_types": ["sliding_attention", "full_attention"] * 2}),
}


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of that family."""
    kind, own = FAMILIES[family]
    config_class = getattr(tf, f"{kind}TextConfig", None) or getattr(tf, f"{kind}Config")
    torch.manual_seed(seed)
    model = getattr(tf, f"{kind}ForCausalLM")(config_class(**{**_SHAPE, **own, **changes}))
    return model.to(dtype).eval()


@cache
def engine(family: str = "llama", dtype: torch.dtype = torch.float32) -> HFEngine:
    """One engine a family and test run."""
    return HFEngine(build(family, dtype=dtype))


def engine_with_text(**changes: Any) -> HFEngine:
    """A new engine of a small llama that reads and writes bytes, so that it can run teams and tasks."""
    tokenizer = byte_level()
    return HFEngine(build("llama", vocab_size=len(tokenizer), **changes), tokenizer, name="tiny")


def ids(count: int, seed: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def prompt(reader: str, *parts: tuple[str | None, tuple[int, ...]]) -> Prompt:
    """A prompt of ``(share, ids)`` parts; share None is the agent's own text."""
    return Prompt(reader, tuple(Segment(token_ids, share) for share, token_ids in parts))
