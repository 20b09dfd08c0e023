"""What the README tells people to type exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from kvbaton.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [page for page in (ROOT / "README.md", ROOT / "AGENTS.md") if page.exists()]


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


def find(words: list[str]):
    """The command that ``words`` call: the root for options alone, a group for its bare name. None: no such one."""
    command = typer.main.get_command(app)
    for word in words:
        if word.startswith("-"):
            break
        children = getattr(command, "commands", None)
        if children is None:
            break
        command = children.get(word)
        if command is None:
            return None
    return command


@pytest.mark.parametrize("hit", sorted(typed("kvbaton")), ids=lambda hit: f"{hit[0].name}: {hit[1].strip()}")
def test_commands_and_their_options_exist(hit):
    words = hit[1].split()
    command = find(words)
    assert command is not None, f"no such command: kvbaton {hit[1]}"
    flags = {flag for param in command.params for flag in [*param.opts, *param.secondary_opts]} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= flags


def test_a_wrong_command_is_found():
    assert find(["compere", "maths"]) is None
    assert find(["store", "sl"]) is None
    assert find(["store"]) is not None


def test_the_readme_names_commands_at_all():
    assert typed("make")
