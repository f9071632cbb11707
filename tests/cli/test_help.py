"""The help of every command, held against the golden file."""

from tests.cli.golden import GOLDEN, every_help


def test_every_command_says_what_the_golden_file_says() -> None:
    """When the change is meant: `make golden`, and look at the diff."""
    assert every_help() == GOLDEN.read_text()
