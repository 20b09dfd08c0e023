"""What the README tells people to type exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from kvbaton.cli import app, docs

ROOT = Path(__file__).parent.parent
PAGES = [page for page in (ROOT / "README.md", ROOT / "AGENTS.md") if page.exists()]
COMMANDS = {tuple(path.split()[1:]) for path, _ in docs.commands(typer.main.get_command(app), "kvbaton")}


def typed(word: str) -> set[tuple[Path, str]]:
    """What stands behind ``word`` at the start of a line or code span in code of README and AGENTS.md."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        code = re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL)
        pattern = rf"(?:^|`|&& |; ){word} ([^\n`#|]+)"
        found |= {(page, hit) for block in code for hit in re.findall(pattern, block, re.M)}
    return found


@pytest.mark.parametrize("hit", sorted(typed("make")), ids=lambda hit: f"{hit[0].name}: {hit[1].strip()}")
def test_make_targets_exist(hit):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert hit[1].split()[0] in targets


@pytest.mark.parametrize("hit", sorted(typed("kvbaton")), ids=lambda hit: f"{hit[0].name}: {hit[1].strip()}")
def test_commands_and_their_options_exist(hit):
    words = hit[1].split()
    command = next((c for c in COMMANDS if tuple(words[: len(c)]) == c), None)
    assert command is not None, f"no such command: kvbaton {hit[1]}"
    known = dict(docs.commands(typer.main.get_command(app), "kvbaton"))[" ".join(["kvbaton", *command])]
    flags = {flag for param in known.params for flag in [*param.opts, *param.secondary_opts]} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= flags


def test_the_readme_names_commands_at_all():
    assert typed("make")
