"""A report as blocks of conditions, tables and figures, written as one HTML file or as Markdown.

The HTML needs nothing from outside: styles and drawings are inside it. It follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LIGHT = ("#1f6feb", "#d1495b", "#2a9d58", "#8250df", "#b7791f", "#0a7ea4", "#c2410c", "#5b6770", "#a61e73", "#5c7c0a")
DARK = ("#79b8ff", "#ff8a98", "#6fd694", "#c8a6ff", "#f0c165", "#62d0ec", "#ffab70", "#b6c2cc", "#f58ac6", "#bddb6b")

_CSS = """
:root { color-scheme: light dark; --bg: #ffffff; --ink: #1c2430; --soft: #5a6572; --line: #d8dee6; --grid: #c9d1da;
  --band: #f5f7fa; LIGHT }
@media (prefers-color-scheme: dark) { :root { --bg: #12161c; --ink: #e4e9ef; --soft: #9aa7b5; --line: #2d3641;
  --grid: #3a4552; --band: #1a2029; DARK } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1240px; padding: 28px 32px 64px; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
h1 { font-size: 26px; margin: 0 0 4px } h2 { font-size: 20px; margin: 44px 0 10px; padding-top: 14px;
  border-top: 1px solid var(--line) } h3 { font-size: 15px; margin: 22px 0 6px }
p.lead, figcaption, .note { color: var(--soft) } p.lead { margin: 0 0 12px } .note { font-size: 13px; margin: 4px 0 0 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: 4px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
td small { display: block; color: var(--soft); font-size: 11px }
th { color: var(--soft); font-weight: 600 } th:first-child, td:first-child { text-align: left }
tbody tr:nth-child(even) { background: var(--band) }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(560px, 1fr)); gap: 26px 30px;
  margin-top: 18px }
figure { margin: 0 } figure svg { width: 100%; height: auto; display: block }
figcaption { font-size: 12.5px; margin-top: 4px }
dl { display: grid; grid-template-columns: max-content 1fr max-content 1fr; gap: 2px 16px; font-size: 13px;
  margin: 6px 0 }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere } details { margin: 8px 0 }
summary { cursor: pointer; color: var(--soft); font-size: 13px } nav a { color: inherit; margin-right: 16px }
"""


@dataclass(frozen=True)
class Table:
    """Cells are plain text; the first column is the row's name."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """An inline SVG, what it shows, and where its numbers are."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Block:
    """One run, or one comparison: what it is, under which conditions, and its tables and figures."""

    title: str
    lead: str
    conditions: Sequence[tuple[str, str]]
    tables: Sequence[Table]
    pictures: Sequence[Picture] = ()


def _colours(names: Sequence[str]) -> str:
    return " ".join(f"--c{i}: {colour};" for i, colour in enumerate(names))


def _html_cell(cell: str) -> str:
    """A range in brackets stands small under its value."""
    value, bracket, interval = cell.partition(" (")
    small = f"<small>{escape(interval.removesuffix(')'))}</small>" if bracket else ""
    return f"<td>{escape(value)}{small}</td>"


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in table.columns)
    body = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (f'<h3>{escape(table.title)}</h3><div class="wide"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>{note}")


def _html_block(index: int, block: Block) -> str:
    short = next((f"{name} {value}" for name, value in block.conditions if name == "commit"), "")
    several = "; then " in short
    tail = f"{'several commits' if several else escape(short)}; all conditions above, data in the tables."
    pictures = "".join(f"<figure>{p.svg}<figcaption>{escape(p.caption)} {tail}</figcaption></figure>"
                       for p in block.pictures)
    conditions = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in block.conditions)
    return (f'<section id="b{index}"><h2>{escape(block.title)}</h2><p class="lead">{escape(block.lead)}</p>'
            f"<details open><summary>Conditions</summary><dl>{conditions}</dl></details>"
            f'{"".join(map(_html_table, block.tables))}<div class="figures">{pictures}</div></section>')


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One self-contained page."""
    css = _CSS.replace("LIGHT", _colours(LIGHT)).replace("DARK", _colours(DARK))
    links = "".join(f'<a href="#b{i}">{escape(b.title)}</a>' for i, b in enumerate(blocks)) if len(blocks) > 1 else ""
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{css}</style></head><body>'
            f"<h1>{escape(title)}</h1><nav>{links}</nav>{''.join(_html_block(i, b) for i, b in enumerate(blocks))}"
            "</body></html>\n")


def _md(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def markdown_table(table: Table) -> str:
    """A GitHub table without its title."""
    rows = [table.columns, ["---"] + ["---:"] * (len(table.columns) - 1), *table.rows]
    return "\n".join(f"| {' | '.join(map(_md, row))} |" for row in rows)


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
    """The same, without drawings."""
    out = [f"# {title}"]
    for block in blocks:
        out += [f"## {block.title}", block.lead]
        for table in block.tables:
            out += [f"### {table.title}", markdown_table(table), *([table.note] if table.note else [])]
        out += ["\n".join(f"- {name}: {_md(value)}" for name, value in block.conditions)]
    return "\n\n".join(out) + "\n"
