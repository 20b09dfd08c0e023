"""`kvbaton models`: which models `load` knows by name."""

from __future__ import annotations

from dataclasses import asdict

from kvbaton.cli.app import Json, app, emit, human_bytes, table


@app.command()
def models(json: Json = False) -> None:
    """List the models that come inside packages: where from, installed, converted."""
    from kvbaton.engine.models import PACKAGED

    rows = [[m.name, m.title, m.licence, "yes" if m.installed else m.install,
             human_bytes(m.cached_bytes) if m.cached else "no"] for m in PACKAGED.values()]
    record = [{**asdict(m), "install": m.install, "installed": m.installed, "cached": m.cached,
               "cache": str(m.cache), "cached_bytes": m.cached_bytes} for m in PACKAGED.values()]
    emit(record, json, lambda: table(
        "Models by name", ["name", "model", "licence", "installed", "converted"], rows,
        caption="Any local folder or Hugging Face id can be given in place of a name."))
