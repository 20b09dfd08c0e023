from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton.errors import TeamError
from kvbaton.teamfile import TeamSpec, load_team, parse_team, team_schema

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "src/kvbaton/examples").glob("*.yaml"))
SOUND = """\
rounds: 1
sampling: {temperature: 1, seed: 3}
inputs:
  question:
  hint: a default
agents:
  - name: solver
    prompt: "{question} {hint}"
    stop: ["\\n"]
  - name: judge
    system: You decide.
    max_new_tokens: 7
    prompt: |
      {question}
      {solver}
"""


def test_a_sound_file():
    spec = parse_team(SOUND)
    assert [agent.name for agent in spec.graph.order] == ["solver", "judge"]
    assert spec.graph.inputs == ("question", "hint")
    solver, judge = spec.members()
    assert (solver.stop, solver.system, solver.max_new_tokens) == (("\n",), None, None)
    assert (judge.system, judge.max_new_tokens, judge.prompt) == ("You decide.", 7, "{question}\n{solver}\n")
    assert spec.sampling is not None
    assert (spec.sampling.temperature, spec.sampling.seed) == (1.0, 3)
    assert (spec.method, spec.model, spec.max_new_tokens) == ("hybrid", "smollm2", 128)


def test_given_inputs_go_over_defaults():
    spec = parse_team(SOUND)
    assert spec.fill({"question": "Why?"}) == {"question": "Why?", "hint": "a default"}
    assert spec.fill({"hint": "mine"}) == {"hint": "mine"}


def test_undeclared_inputs_are_read_off_the_prompts():
    spec = parse_team("agents: [{name: a, prompt: '{q}{r}'}]")
    assert spec.graph.inputs == ("q", "r")
    assert spec.fill({"q": "x"}) == {"q": "x"}


@pytest.mark.parametrize(("change", "words"), [
    (("prompt: |", "promt: |"), "line 13, agents[1].promt: unknown key 'promt': did you mean 'prompt'?"),
    (("prompt: |", "promt: |"), "line 10, agents[1].prompt: field required"),
    (("rounds:", "round:"), "line 1, round: unknown key 'round': did you mean 'rounds'?"),
    (("seed: 3", "sed: 3"), "line 2, sampling.sed: unknown key 'sed': did you mean 'seed'?"),
    (("rounds: 1", "rounds: one"), "line 1, rounds: input should be a valid integer"),
    (("rounds: 1", "rounds: 0"), "line 1, rounds: input should be greater than or equal to 1"),
    (("temperature: 1", "temperature: 0"), "line 2, sampling.temperature: input should be greater than 0"),
    (("name: solver", "name: yes"), "line 7, agents[0].name: input should be a valid string"),
    (("max_new_tokens: 7", "max_new_tokens: true"), "line 12, agents[1].max_new_tokens: input should be a valid int"),
    (('["\\n"]', "x"), "line 9, agents[0].stop: input should be a valid list"),
    (("system: You decide.", "name: judge"), "line 11: the key 'name' stands there twice"),
    (("rounds: 1", "rounds: [1"), "not YAML"),
    (("rounds: 1", "rounds: !!python/name:os.system"), "not YAML"),
    (("{solver}", "{solvr}"), "agent 'judge', prompt, line 2, column 1: unknown placeholder 'solvr'"),
    (("{solver}", "{solver"), "agent 'judge', prompt, line 2, column 1: a lone '{'"),
    (("name: judge", "name: solver"), "two agents are called 'solver'"),
    (("name: judge", "name: hint"), "'hint' is an input and an agent"),
    (("{hint}", "{hint}{judge}"), "solver -> judge -> solver"),
    (("rounds: 1", "rounds: 2"), "rounds=2"),
])
def test_a_mistake_is_named_with_its_place(change, words):
    text = SOUND.replace(*change)
    assert text != SOUND
    with pytest.raises(TeamError, match=re.escape(words)) as caught:
        parse_team(text, "t.yaml")
    assert all(line.startswith("t.yaml") for line in str(caught.value).splitlines()
               if not line.startswith(" "))


@pytest.mark.parametrize(("text", "words"), [
    ("", "a mapping"), ("- a", "a mapping"), ("7", "a mapping"), ("agents: []", "at least one agent"),
    ("{}", "agents: field required"), ("agents: x", "valid list"), ("agents: [x]", "agents[0]: input should be"),
    ("a: 1\n---\nb: 2", "not YAML"), ("\x00", "not YAML"), ("{1: 2, agents: []}", "line 1"),
    ("agents: &a [*a]", "agents[0]: input should be"), ("? [a]\n: b", "not YAML"),
])
def test_files_that_are_no_team(text, words):
    with pytest.raises(TeamError, match=re.escape(words)):
        parse_team(text)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(TeamError, match=r"cannot read the team file .*none\.yaml"):
        load_team(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"method: caf\xe9")
    with pytest.raises(TeamError, match=r"latin\.yaml"):
        load_team(tmp_path / "latin.yaml")


def test_the_committed_schema_is_the_models_own():
    assert json.loads((ROOT / "docs/team.schema.json").read_text()) == team_schema(), (
        "run: python -c 'import json, kvbaton.teamfile as t; print(json.dumps(t.team_schema(), indent=2))' "
        "> docs/team.schema.json")


def test_the_schema_knows_every_key_and_forbids_others():
    schema = team_schema()
    assert set(schema["properties"]) == set(TeamSpec.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["AgentSpec"]["additionalProperties"] is False


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_sound_and_runs_without_further_inputs(path):
    spec = load_team(path)
    assert set(spec.fill({})) == set(spec.graph.inputs)
    assert f"kvbaton run {path.stem}" in path.read_text()


def test_the_examples_are_there():
    assert [path.stem for path in EXAMPLES] == ["debate", "documents", "maths"]


def test_checking_a_file_loads_no_torch():
    code = f"import sys, kvbaton.teamfile as t; t.load_team({str(EXAMPLES[0])!r}); t.team_schema(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"torch", "transformers"} & set(done.stdout.split())
