"""`bloomery fidelity` on the shipped model."""

import json
import os

import pytest
import torch
from typer.testing import CliRunner

from bloomery.cli.fidelity import show
from bloomery.cli.main import app
from bloomery.models import tiny
from bloomery.models.kernel_probe import probe
from bloomery.models.load import load_decoder
from bloomery.types.resources import Fidelity

SHORT = ["--threads", "1", "--tokens", "2"]


@pytest.fixture(autouse=True)
def _its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prepares that of its process, which is the tests' here."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_the_shipped_model_passes_and_json_has_the_whole_card():
    done = CliRunner().invoke(app, ["fidelity", "--json", *SHORT])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert (said.pop("model"), said.pop("architecture")) == ("bloomery-tiny", "qwen3")
    card = Fidelity.model_validate(said)
    assert (card.mode, card.verdict, card.max_abs, card.sequences, card.tokens) == ("exact", "pass", 0.0, 9, 18)


@pytest.mark.slow
def test_the_table_has_a_line_for_every_model():
    done = CliRunner().invoke(app, ["fidelity", "bloomery-tiny", "--dtype", "bfloat16", *SHORT])
    assert done.exit_code == 0, done.output
    head, line = done.output.splitlines()
    assert head.split()[0] == "model"
    name, family, mode, tokens, *differences, verdict = line.split()
    assert (name, family, tokens, verdict) == ("bloomery-tiny", "qwen3", "18", "pass")
    # With some processors' instructions for it the product of half precision depends on the number of rows, and nothing is promised.
    assert mode == ("exact" if _bit_exact(torch.bfloat16) else "plain")
    assert mode == "plain" or differences == ["0", "0", "100.0%"]


def _bit_exact(dtype: torch.dtype) -> bool:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return probe(load_decoder(tiny.PATH, dtype=dtype, device="cpu")).bit_exact
    finally:
        torch.set_num_threads(before)


def test_an_unknown_model_is_one_line_and_exit_code_2():
    done = CliRunner().invoke(app, ["fidelity", "no-such-model"])
    assert done.exit_code == 2
    assert "unknown model `no-such-model`" in done.output


def test_a_card_that_fails_says_where(capsys):
    failing = Fidelity(
        mode="exact",
        verdict="fail",
        k3=0.25,
        mean_abs=0.1,
        max_abs=0.5,
        bit_equal=0.5,
        sequences=1,
        tokens=2,
        first_difference="layer 3, attention, from position 7 on",
        dtype="float32",
        numerics="n",
        measured_us=0,
    )
    assert not show("m", "llama", failing, as_json=False)
    shown = capsys.readouterr().out
    assert "fail" in shown
    assert "the first difference: layer 3, attention, from position 7 on" in shown
