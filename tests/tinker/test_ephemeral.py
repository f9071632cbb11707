"""Samplers that a training loop leaves behind, through the unmodified SDK: the newest work on, and who asks one that let go is told what to do."""

from pathlib import Path

import httpx
import pytest
import tinker
from sqlalchemy import update

from bloomery.services.housekeeping.ephemeral import Keeping
from bloomery.store import rows
from tests.sdk import connected
from tests.tinker.over_fake_engine import KEY, MODEL, Served, served
from tests.tinker.samples import ask


def grow_old(server: Served) -> None:
    """Nobody asked any sampler for long, while the clients went on living."""
    old = [update(rows.checkpoint).values(created_us=1), update(rows.sampling_session).values(created_us=1, asked_us=1)]
    server.services.sessions._asked_us.clear()
    server.do(lambda: server.services.sessions._database.write(lambda connection: [connection.execute(statement) for statement in old]))


def days_later(server: Served) -> None:
    """So long that the server has tidied up."""
    grow_old(server)
    server.do(server.services.garbage.expire)


def test_a_sample_that_is_waited_for_keeps_its_sampler(tmp_path: Path) -> None:
    with served(tmp_path, record="full") as server, connected(server) as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        sampler = run.save_weights_and_get_sampling_client().result()
        run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        run.save_weights_and_get_sampling_client().result()
        ask(sampler).result()
        sampler_id = sampler._sampling_session_id
        server.services.garbage.ephemeral.keeping = Keeping(newest_per_run=1)
        grow_old(server)
        fetched = httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": f"sample|{sampler_id}|0"}, headers={"x-api-key": KEY})
        assert fetched.status_code == 200
        server.do(server.services.garbage.expire)
        assert ask(sampler).result(timeout=120).sequences


def test_a_loop_that_saves_for_a_new_sampler_in_every_step_keeps_the_newest(tmp_path: Path) -> None:
    with served(tmp_path, record="full") as server, connected(server) as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        samplers = []
        for _ in range(3):
            run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
            samplers.append(run.save_weights_and_get_sampling_client().result())
        days_later(server)
        for sampler in samplers:
            assert ask(sampler).result(timeout=120).sequences
        server.services.garbage.ephemeral.keeping = Keeping(newest_per_run=2)
        days_later(server)
        with pytest.raises(tinker.APIStatusError, match="save the run's weights again for another sampler") as refused:
            ask(samplers[0]).result(timeout=120)
        assert (refused.value.status_code, refused.value.body["code"], refused.value.body["category"]) == (410, "gone", "user")  # type: ignore[index,call-overload]
        for sampler in samplers[1:]:
            assert ask(sampler).result(timeout=120).sequences
        again = run.save_weights_and_get_sampling_client().result()
        assert ask(again).result(timeout=120).sequences
