"""The help of every command, held against the golden file."""

import typer
from typer.core import TyperGroup

from bloomery.cli.main import app
from tests.cli.golden import GOLDEN, every_help

SAY_NOTHING = {("dataset", "delete"), ("eval", "delete"), ("job", "eject")}
"""Of what is gone there is nothing to say, and a script is one."""


def test_every_command_says_what_the_golden_file_says() -> None:
    """When the change is meant: `make golden`, and look at the diff."""
    assert every_help() == GOLDEN.read_text()


def test_every_command_of_a_noun_has_an_answer_for_programs() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    nouns = {name: noun for name, noun in group.commands.items() if isinstance(noun, TyperGroup)}
    assert nouns.keys() == {"dataset", "job", "model", "deployment", "eval", "grader", "key", "sync"}
    for noun, verbs in nouns.items():
        for verb, command in verbs.commands.items():
            has_json = any("--json" in option.opts for option in command.params)
            assert has_json or (noun, verb) in SAY_NOTHING, f"bloomery {noun} {verb}"
