"""`kvbaton store`: saved memories, looked at without a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbaton.cli.app import Json, app, emit, human_bytes, table
from kvbaton.errors import KVBatonError, StoreError, UsageError

store_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                        help="Look at, check and remove saved memories (what methods learned).")
app.add_typer(store_app, name="store")

Paths = Annotated[list[Path], typer.Argument(help="Files, or folders whose *.safetensors files are meant.",
                                             metavar="PATHS...", show_default=False)]


@store_app.command("ls")
def ls(paths: Paths, json: Json = False) -> None:
    """Show the model, the corrector and the edges of saved memories, without reading their tensors."""
    from kvbaton.store import describe

    found = [(path, describe(path)) for path in _files(paths)]
    tables = lambda: [_edges(path, manifest) for path, manifest in found]  # noqa: E731
    emit([{"path": str(path), "bytes": manifest.nbytes, **asdict(manifest)} for path, manifest in found], json, tables)


@store_app.command("check")
def check(paths: Paths, json: Json = False) -> None:
    """Read saved memories whole and verify them. Exit 1 if one is broken; all are looked at."""
    from kvbaton.store import check_file

    faults: dict[str, str | None] = {}
    for path in _files(paths):
        try:
            check_file(path)
            faults[str(path)] = None
        except StoreError as error:
            faults[str(path)] = str(error)
    emit([{"path": path, "ok": fault is None, "fault": fault} for path, fault in faults.items()], json,
         lambda: table("Saved memories", ["file", "state"], [[p, fault or "whole"] for p, fault in faults.items()]))
    broken = [path for path, fault in faults.items() if fault]
    if broken:
        raise StoreError(f"{len(broken)} of {len(faults)} broken: remove with `kvbaton store rm {' '.join(broken)}`")


@store_app.command("rm")
def rm(paths: Paths, json: Json = False) -> None:
    """Remove saved memories, broken ones too. If one of the files is not a *.safetensors file, nothing is removed."""
    files = _files(paths)
    strangers = [str(path) for path in files if path.suffix != ".safetensors"]
    if strangers:
        raise UsageError(f"{', '.join(strangers)}: not a saved memory (*.safetensors); nothing was removed")
    sizes = {str(path): path.stat().st_size for path in files}
    try:
        for path in files:
            path.unlink()
    except OSError as error:
        raise KVBatonError(f"cannot remove {error.filename}: {error.strerror}") from error
    emit([{"path": path, "bytes": size} for path, size in sizes.items()], json,
         lambda: f"removed {len(sizes)} file(s), {human_bytes(sum(sizes.values()))}")


def _files(paths: list[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        inside = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"{path} holds no *.safetensors file")
        files += inside
    return files


def _edges(path: Path, manifest: Any) -> Any:
    g, identity = manifest.geometry, manifest.identity
    rows = [[str(record.edge), str(record.texts), human_bytes(record.nbytes)] for record in manifest.edges]
    about = (f"model {identity.name} ({identity.fingerprint[:12]}), {g.layers} layers x {g.kv_heads} KV heads x "
             f"{g.head_dim}, {str(g.dtype).removeprefix('torch.')}; corrector {manifest.corrector.rpartition('.')[2]}; "
             f"{human_bytes(manifest.nbytes)}")
    return table(str(path), ["edge", "texts", "bytes"], rows, right=("texts", "bytes"), caption=about)
