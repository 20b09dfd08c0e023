"""Small tokenizers of the kinds that matter, trained on a few lines, with chat templates of the kinds that matter."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "You solve maths problems step by step. A colleague wrote: the answer is 42.",
    "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning.",
    "Question: how many are left? Solution: 16 - 3 = 13. Review: the solution is right.",
    "Hello world, hello again!  Two  spaces\nand\n\nlines. You are a helpful assistant. user system",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
TRIMMED = CHATML.replace("m['content']", "(m['content'] | trim)")
LLAMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set sys = '<<SYS>>\n' + messages[0]['content'] + "
    "'\n<</SYS>>\n\n' %}{% set messages = messages[1:] %}{% else %}{% set sys = '' %}{% endif %}"
    "{{ '[INST] ' + sys + messages[0]['content'].strip() + ' [/INST]' }}")
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('Only users') }}{% endif %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}")
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{{ '<start_of_turn>model\n' }}")
DROPS_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] == 'user' %}")


def wrap(tokenizer: Tokenizer, template: str | dict[str, str] | None, **special: str) -> PreTrainedTokenizerFast:
    out = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    out.chat_template = template
    return out


@cache
def byte_level(template: str | None = CHATML, prefix_space: bool = False) -> PreTrainedTokenizerFast:
    """GPT-2's kind: Llama 3, Qwen, SmolLM."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return wrap(tokenizer, template, eos_token="<|im_end|>", unk_token="<|endoftext|>")


@cache
def sentencepiece(template: str | None, scheme: str, special: tuple[str, ...] = (), rstrip: bool = False,
                  ) -> PreTrainedTokenizerFast:
    """Llama 2's kind, with byte fallback. ``scheme``: prepend (by a normaliser), first, always, never."""
    base = Tokenizer(models.BPE(unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    base.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=700, show_progress=False,
                                                       special_tokens=["<unk>", "<s>", "</s>", *bytes_]))
    spec = json.loads(base.to_str())
    spec["model"] |= {"byte_fallback": True, "fuse_unk": True}
    spec["added_tokens"] = spec["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    if scheme in ("prepend", "never"):
        steps = [normalizers.Prepend("▁")] if scheme == "prepend" else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=rstrip) for t in special])
    return wrap(tokenizer, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def unigram() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator(TEXT, trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, unk_token="<unk>", special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=["\n", *map(chr, range(32, 127))]))
    return wrap(tokenizer, MISTRAL, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "chatml": byte_level,
    "chatml-trimmed": lambda: byte_level(TRIMMED),
    "drops-system": lambda: byte_level(DROPS_SYSTEM),
    "prefix-space": lambda: byte_level(CHATML, prefix_space=True),
    "llama2-legacy": lambda: sentencepiece(LLAMA2, "prepend"),
    "llama2": lambda: sentencepiece(LLAMA2, "first"),
    "llama2-always": lambda: sentencepiece(LLAMA2, "always"),
    "mistral": lambda: sentencepiece(MISTRAL, "first", ("[INST]", "[/INST]")),
    "gemma": lambda: sentencepiece(GEMMA, "never", ("<start_of_turn>", "<end_of_turn>")),
    "phi3": lambda: sentencepiece(CHATML, "first", ("<|im_start|>", "<|im_end|>"), rstrip=True),
    "unigram": unigram,
}
