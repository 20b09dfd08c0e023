"""Plots as inline SVG whose colours are CSS variables, so that one drawing serves a light and a dark page.

matplotlib draws with stand-in colours; they are replaced in the SVG text: ink by ``currentColor``, the others by
``var(--c0)`` … and ``var(--grid)``. Text is drawn as paths: labels sit where they were laid out, on every machine.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

from kvbaton.recipes import names

_INK, _GRID = "#010203", "#0a0b0c"
_SERIES = tuple(f"#{0x30 + i:02x}{0x40 + i:02x}{0x50 + i:02x}" for i in range(10))
_MARKERS = "osD^vPX*<>"
_STYLE = {
    "svg.fonttype": "path", "svg.hashsalt": "kvbaton", "font.size": 10, "text.color": _INK, "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.titlesize": 11, "axes.grid": True,
    "grid.color": _GRID, "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "legend.frameon": False, "legend.labelcolor": _INK,
}


@dataclass(frozen=True)
class Dot:
    """A method in a plane. ``low``, ``high``: interval of ``y``."""

    name: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None


def _look(name: str, i: int) -> dict[str, str]:
    """Colour and marker: a method's own, the same in every plot; anything else goes by its place ``i`` in its plot."""
    known = names()
    i = known.index(name) if name in known else len(known) + i
    return {"color": _SERIES[i % len(_SERIES)], "marker": _MARKERS[(i + i // len(_SERIES)) % len(_MARKERS)]}


def _svg(figure: Figure, label: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg"):]
    for i, colour in enumerate(_SERIES):
        text = text.replace(colour, f"var(--c{i})")
    text = text.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
    head = rf'<svg viewBox="\1" role="img" aria-label="{label}">'
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', head, text, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)


def _axes(width: float = 6.4, height: float = 3.6) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def _legend(axes: Any) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, handletextpad=0.4, labelspacing=0.35)


def _frontier(dots: Sequence[Dot], smaller_y: bool) -> list[Dot]:
    """Dots that no other beats on both axes, by x; smaller x is better."""
    out: list[Dot] = []
    for dot in sorted(dots, key=lambda d: (d.x, d.y if smaller_y else -d.y)):
        if not out or (dot.y < out[-1].y if smaller_y else dot.y > out[-1].y):
            out.append(dot)
    return out


def pareto(dots: Sequence[Dot], x_label: str, y_label: str, title: str, log_y: bool = True,
           smaller_y: bool = True) -> str:
    """Quality against cost; a line joins the methods that no other beats on both."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes()
        front = _frontier(dots, smaller_y)
        axes.plot([d.x for d in front], [d.y for d in front], color=_GRID, linewidth=2, zorder=1)
        for i, dot in enumerate(dots):
            look = _look(dot.name, i)
            if dot.low is not None and dot.high is not None:
                axes.plot([dot.x, dot.x], [dot.low, dot.high], color=look["color"], linewidth=1, alpha=0.6)
            axes.plot([dot.x], [dot.y], linestyle="", markersize=7, label=dot.name, **look)
        if log_y:
            axes.set_yscale("log")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_title(title, loc="left")
        _legend(axes)
        return _svg(figure, title)


def lines(series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str, title: str,
          ticks: Sequence[str] | None = None, log_x: bool = False, log_y: bool = False,
          dashed: frozenset[str] = frozenset()) -> str:
    """One line a name through ``(x, y)`` points; ``ticks`` names x = 0, 1, …; ``dashed`` lines are limits."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes()
        for i, (name, points) in enumerate(series.items()):
            style = {"linestyle": "--", "marker": "", "color": _INK} if name in dashed else _look(name, i)
            axes.plot([x for x, _ in points], [y for _, y in points], markersize=5, linewidth=1.4, label=name, **style)
        if log_x:
            axes.set_xscale("log", base=2)
            values = sorted({x for points in series.values() for x, _ in points})
            axes.set_xticks(values, [f"{x:g}" for x in values])
            axes.minorticks_off()
        if log_y:
            axes.set_yscale("log")
        if ticks is not None:
            axes.set_xticks(range(len(ticks)), ticks, rotation=30 if max(map(len, ticks), default=0) > 8 else 0,
                            ha="right" if max(map(len, ticks), default=0) > 8 else "center")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_title(title, loc="left")
        _legend(axes)
        return _svg(figure, title)


def bars(parts: Mapping[str, Sequence[float]], names: Sequence[str], x_label: str, title: str) -> str:
    """Horizontal stacked bars: one a name, one colour a part."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(height=max(1.6, 0.28 * len(names) + 0.9))
        left = [0.0] * len(names)
        for i, (part, values) in enumerate(parts.items()):
            axes.barh(range(len(names)), values, left=left, color=_SERIES[i], label=part, height=0.7)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(x_label)
        axes.set_title(title, loc="left")
        if len(parts) > 1:
            _legend(axes)
        return _svg(figure, title)


def heat(rows: Sequence[Sequence[float]], row_names: Sequence[str], column_names: Sequence[str], x_label: str,
         title: str) -> str:
    """A heat map drawn as cells of one colour at growing opacity: light and dark pages both can show it."""
    with matplotlib.rc_context({**_STYLE, "axes.grid": False}):
        figure, axes = _axes(width=8.0, height=max(1.8, 0.3 * len(row_names) + 1.0))
        top = max((v for row in rows for v in row), default=1.0) or 1.0
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                axes.barh([y], [1], left=[x - 0.5], height=1.0, color=_SERIES[0], alpha=value / top, linewidth=0)
        axes.set_yticks(range(len(row_names)), row_names)
        every = max(1, len(column_names) // 16)
        axes.set_xticks(range(0, len(column_names), every), column_names[::every])
        axes.set_xlim(-0.5, len(column_names) - 0.5)
        axes.set_ylim(len(row_names) - 0.5, -0.5)
        axes.set_xlabel(x_label)
        axes.set_title(f"{title} (full colour: {top:.3g})", loc="left")
        return _svg(figure, title)
