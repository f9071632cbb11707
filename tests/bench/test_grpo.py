"""What the benchmark of GRPO measures is our loop on a real server, with steps that are all the same work."""

import argparse
from pathlib import Path

import pytest

from bench import grpo
from bench.shapes import EMPTY, write_directory
from bloomery.client import Client
from bloomery.render.directory import read_directory
from tests.live import running_server

ASKED = argparse.Namespace(groups=2, group_size=4, prompt_tokens=8, new_tokens=48, learning_rate=1e-3, steps=3, threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(grpo.RANKS))
def test_our_loop_samples_every_token_of_every_rollout_and_trains_what_was_served(tmp_path: Path, kind: str) -> None:
    model, prompts = grpo.endless(EMPTY, tmp_path / "model"), grpo.prompts_of(EMPTY.vocab_size, ASKED)
    with running_server(tmp_path / "data", "--model", str(model)) as server, Client(server.url, server.key) as client:
        found = grpo.ours(client, prompts, grpo.RANKS[kind], tmp_path / "cursor.json", ASKED)
    assert found.largest_difference == 0
    assert len(found.loop.seconds) == len(found.loop.rollout_seconds) == ASKED.steps
    assert all(0 < rollouts < whole for rollouts, whole in zip(found.loop.rollout_seconds, found.loop.seconds, strict=True))


def test_the_model_has_no_token_that_ends_a_text(tmp_path: Path) -> None:
    assert read_directory(write_directory(EMPTY, tmp_path / "model")).end_tokens
    assert not read_directory(grpo.endless(EMPTY, tmp_path / "endless")).end_tokens


def test_what_is_shown_are_medians_and_tokens_of_a_whole_step() -> None:
    loop = grpo.Loop(seconds=[4.0, 2.0, 9.0], rollout_seconds=[1.0, 1.0, 8.0], rewards=[1.0, 2.0, 3.0])
    shown = grpo.shown(loop, ASKED)
    assert (shown["step_s"], shown["rollouts_s"], shown["training_s"]) == (4.0, 1.0, 1.0)
    assert shown["fastest_and_slowest_s"] == [2.0, 9.0]
    assert shown["sampled_tokens_per_s"] == 2 * 4 * 48 / 4.0
    assert shown["of_training_tokens_per_s"] == 2 * 4 * (8 + 48) / 1.0
