"""`kvbaton report`: results files as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbaton.cli.app import Json, app, emit


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Results files of eval, bench or analyze.")],
    out: Annotated[Path, typer.Option(help="The page; a .md of the same name is written too.")] = Path("report.html"),
    compare: Annotated[bool, typer.Option("--compare", help="Two eval runs, old then new; exit 1 if worse.")] = False,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "KVBaton results",
    json: Json = False,
) -> None:
    """Write one self-contained HTML page, and Markdown, from results files."""
    from kvbaton.bench import regression
    from kvbaton.bench.page import to_html, to_markdown
    from kvbaton.bench.result import read
    from kvbaton.errors import MissingExtra, UsageError

    if compare and len(runs) != 2:
        raise UsageError(f"--compare takes two results files, old and new, got {len(runs)}")
    found = [read(path) for path in runs]
    for run in found:
        for line, why in run.corrupt:
            typer.echo(f"kvbaton: {run.path}, line {line} is corrupt and was left out: {why}", err=True)
    try:
        from kvbaton.bench.report import blocks
    except ImportError:
        raise MissingExtra("matplotlib, which draws the report,", "pip install 'kvbaton[eval]'") from None
    parts = [regression.block(*found)] if compare else []
    parts += blocks(found)
    markdown = out.with_suffix(".md")
    for path, text in ((out, to_html(title, parts)), (markdown, to_markdown(title, parts))):
        _write(path, text)
    changes = regression.compare(*found) if compare else []
    bad = [f"{c.method}, {c.quantity}: {c.written}" for c in changes if c.verdict == regression.WORSE]
    emit({"html": str(out), "markdown": str(markdown), "regressions": bad}, json,
         lambda: [f"{out} and {markdown}", *(f"regression: {line}" for line in bad)])
    if bad:
        raise typer.Exit(1)


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    from kvbaton.errors import DataError

    scratch = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as problem:
        scratch.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {problem.strerror}") from problem
