"""The typer app, and what all commands share: options, output, progress.

Only typer, rich and the standard library are imported up here; a command imports what it needs when it runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="kvbaton",
    help="Agents that share a language model hand its KV cache on: moved, corrected, recomputed only where it must be.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Model = Annotated[str, typer.Option(help="A name from `kvbaton models`, a local folder or a Hugging Face id.")]
Dtype = Annotated[str | None, typer.Option(
    help="float32, bfloat16 or float16. Default: bfloat16 for packaged models, the checkpoint's own for others.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... Default: cuda where there is one.")]

def _show_version(wanted: bool) -> None:
    if wanted:
        from kvbaton import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version,
                                          help="Print the version and stop.")] = False,
) -> None:
    """Options before any command; ``version`` is acted on by its callback."""


Tick = Callable[[str], None]
"""Called with what has just been done; moves the progress display one step on."""

QUIET_S = 2.0
"""Nothing that is done sooner shows progress."""


def emit(record: Any, as_json: bool, show: Callable[[], object]) -> None:
    """Print ``record`` as JSON, or what ``show`` returns: one rich renderable or a list of them."""
    if as_json:
        print(json.dumps(record, ensure_ascii=False, indent=2, default=str))
        return
    from rich.console import Console

    shown = show()
    for renderable in shown if isinstance(shown, list) else [shown]:
        _console(Console).print(renderable)


def _console(kind: Any) -> Any:
    """A console as wide as the terminal; 160 columns where the output is piped, so that tables keep their words."""
    return kind(width=None if sys.stdout.isatty() else 160, highlight=False)


def table(title: str, columns: list[str], rows: list[list[str]], right: tuple[str, ...] = (),
          caption: str | None = None) -> Any:
    """A rich table of plain strings; columns named in ``right`` are numbers; ``caption`` stands below it."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        out.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        out.add_row(*map(Text, row))
    return Group(out, Text(f"{caption}\n", style="dim")) if caption else out


@contextmanager
def progress(label: str, steps: int) -> Iterator[Tick]:
    """Progress on stderr with a time estimate: a bar on a terminal, else a line every few seconds."""
    if not sys.stderr.isatty():
        yield _lines(label, steps)
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (rich_progress.TextColumn("{task.description}"), rich_progress.BarColumn(),
               rich_progress.MofNCompleteColumn(), rich_progress.TimeElapsedColumn(), rich_progress.TextColumn("left"),
               rich_progress.TimeRemainingColumn(), rich_progress.TextColumn("{task.fields[last]}"))
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=steps, last="")
        yield lambda done: bar.update(task, advance=1, last=done)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr while something of unknown length runs; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield


def _lines(label: str, steps: int) -> Tick:
    began = said = time.monotonic()
    count = 0

    def tick(done: str) -> None:
        nonlocal said, count
        count += 1
        now = time.monotonic()
        if now - said >= QUIET_S:
            said = now
            left = (now - began) / count * (steps - count)
            print(f"{label}: {count}/{steps}, {done}; about {max(left, 0):.0f} s left", file=sys.stderr, flush=True)

    return tick


def human_bytes(count: float) -> str:
    """``1_536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
