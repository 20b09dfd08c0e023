"""The file that keeps a memory: one safetensors file whose header carries a JSON manifest.

    ┌ header: {"0.base_k": ..., "kvbaton": manifest} ┐┌ tensors ┐
    manifest: format, model identity, geometry, corrector, library versions, edges

Nothing in it is executed and nothing in it names a path. A file is replaced whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvbaton.errors import StoreError
from kvbaton.kv import Geometry
from kvbaton.prompt import Edge

FORMAT = 1
_KEY = "kvbaton"
_NAME = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_LONGEST_NAME = 400


@dataclass(frozen=True)
class ModelIdentity:
    """Which model a memory belongs to: name, fingerprint of weights and config, and its `Rope.fingerprint`."""

    name: str
    fingerprint: str
    rope: str


@dataclass(frozen=True)
class EdgeRecord:
    """One edge in a file: texts learned from, bytes held, names of its tensors."""

    edge: Edge
    texts: int
    nbytes: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """What a file says about itself."""

    identity: ModelIdentity
    geometry: Geometry
    corrector: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    edges: tuple[EdgeRecord, ...]

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.edges)


def settings_of(corrector: Any) -> tuple[str, dict[str, Any]]:
    """Class path and hyper-parameters of a corrector, as JSON gives them back."""
    kind = type(corrector)
    fields = {f.name: getattr(corrector, f.name) for f in dataclasses.fields(corrector)}
    return f"{kind.__module__}.{kind.__qualname__}", json.loads(json.dumps(fields, default=_plain))


def write(path: str | os.PathLike[str], manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Write atomically; ``tensors`` are named ``<edge index>.<name>``. Raises StoreError, and leaves no half file."""
    target = Path(path)
    if target.is_dir():
        raise StoreError(f"{target} is a folder: give the name of a file, such as {target / 'memory.safetensors'}")
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(_apart(tensors), scratch, metadata={_KEY: _to_json(manifest)})
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot write {target}: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def describe(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a file, without reading a tensor. Raises StoreError."""
    return _open(path)[0]


def check_file(path: str | os.PathLike[str]) -> Manifest:
    """Read a whole file as `read` does, without a model. Raises StoreError with the first fault."""
    return read(path)[0]


def read(path: str | os.PathLike[str]) -> tuple[Manifest, tuple[dict[str, Tensor], ...]]:
    """The manifest and, for each of its edges, the tensors by name. Raises StoreError, also on non-finite values."""
    manifest, held = _open(path)
    wanted = {f"{i}.{name}" for i, record in enumerate(manifest.edges) for name in record.tensors}
    if wanted != held:
        odd = sorted(wanted ^ held)[0]
        raise StoreError(f"{path}: tensor {odd!r} is {'missing' if odd in wanted else 'not in the manifest'}")
    edges: list[dict[str, Tensor]] = []
    try:
        with safe_open(path, framework="pt") as file:
            for i, record in enumerate(manifest.edges):
                edges.append({name: file.get_tensor(f"{i}.{name}").clone() for name in record.tensors})
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    for record, tensors in zip(manifest.edges, edges, strict=True):
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise StoreError(f"{path}: edge {record.edge}: {name} has values that are not finite")
    return manifest, tuple(edges)


def require_match(path: str | os.PathLike[str], manifest: Manifest, identity: ModelIdentity, geometry: Geometry,
                  corrector: Any) -> None:
    """Raise StoreError naming the first field in which the file and the caller differ, with both values."""
    name, settings = settings_of(corrector)
    pairs: list[tuple[str, Any, Any]] = [("corrector", manifest.corrector, name)]
    pairs += [(f"model {f.name}", getattr(manifest.identity, f.name), getattr(identity, f.name))
              for f in dataclasses.fields(identity)]
    pairs += [(f"geometry {f.name}", getattr(manifest.geometry, f.name), getattr(geometry, f.name))
              for f in dataclasses.fields(geometry)]
    pairs += [(f"corrector setting {key}", manifest.settings.get(key, "absent"), settings.get(key, "absent"))
              for key in sorted({*manifest.settings, *settings})]
    for what, theirs, ours in pairs:
        if theirs != ours:
            raise StoreError(f"{path} does not fit: {what} is {theirs!r} in the file and {ours!r} here")


def library_versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for package in ("kvbaton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def _plain(value: object) -> object:
    return value.name if isinstance(value, Enum) else str(value)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no storage, as safetensors asks; states of two edges may share a base."""
    out: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, given in tensors.items():
        tensor = given.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        out[name] = tensor
    return out


def _to_json(manifest: Manifest) -> str:
    raw = dataclasses.asdict(manifest)
    raw["geometry"]["dtype"] = str(manifest.geometry.dtype).removeprefix("torch.")
    return json.dumps({"format": FORMAT, **raw}, sort_keys=True)


def _open(path: str | os.PathLike[str]) -> tuple[Manifest, set[str]]:
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            names = set(file.keys())
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise StoreError(f"{path} is not a whole safetensors file: {error}") from error
    if text is None:
        raise StoreError(f"{path} was not written by KVBaton: it has no manifest")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: its manifest is not JSON: {error}") from error
    try:
        return _from_json(raw), names
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error


def _from_json(raw: Any) -> Manifest:
    found = _take(raw, "format", int)
    if found != FORMAT:
        raise StoreError(f"its format is {found}, this version of KVBaton reads {FORMAT}")
    model, shape = _take(raw, "identity", dict), _take(raw, "geometry", dict)
    dtype = getattr(torch, _take(shape, "dtype", str), None)
    if not isinstance(dtype, torch.dtype):
        raise StoreError(f"its manifest names an unknown dtype {shape['dtype']!r}")
    edges = tuple(_edge(record) for record in _take(raw, "edges", list))
    if len({record.edge for record in edges}) < len(edges):
        raise StoreError("its manifest lists an edge twice")
    return Manifest(
        identity=ModelIdentity(**{key: _take(model, key, str) for key in ("name", "fingerprint", "rope")}),
        geometry=Geometry(dtype=dtype, **{key: _take(shape, key, int) for key in ("layers", "kv_heads", "head_dim")}),
        corrector=_take(raw, "corrector", str), settings=_take(raw, "settings", dict),
        versions={key: _take(_take(raw, "versions", dict), key, str) for key in raw["versions"]}, edges=edges)


def _edge(raw: Any) -> EdgeRecord:
    edge = _take(raw, "edge", dict)
    names = tuple(_take({"name": name}, "name", str) for name in _take(raw, "tensors", list))
    if len(set(names)) < len(names) or not all(_NAME.fullmatch(name) for name in names):
        raise StoreError("its manifest lists a tensor twice or under a name that is not allowed")
    ends = {key: _take(edge, key, str) for key in ("share", "source", "reader")}
    return EdgeRecord(Edge(slot=_take(edge, "slot", int), **ends), _take(raw, "texts", int), _take(raw, "nbytes", int),
                      names)


def _take(raw: Any, key: str, kind: type) -> Any:
    """The value under ``key``, of that type; numbers are not negative, strings not endless."""
    value = raw.get(key) if isinstance(raw, dict) else None
    good = isinstance(value, kind) and not (kind is int and (isinstance(value, bool) or cast(int, value) < 0))
    if not good or (kind is str and len(cast(str, value)) > _LONGEST_NAME):
        raise StoreError(f"its manifest has no valid {key!r}")
    return value
