"""Journals that are damaged while the server is down: a damaged run stops and says what is wrong with which file, and no other run notices.

One story of three lives of a server. The first is killed while operations of every run wait for an engine that stands still; then each run but one is
damaged in a way of its own. In the second, callers are told, and what is only cut off is sent or computed again. For the third the files are brought
back: nothing was built on the damage.
"""

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import tinker

from bloomery.client import Client
from bloomery.store.journal import extent
from bloomery.store.segments import HEADER_BYTES
from tests.live import LiveServer, alive, free_port, running_server, wait_until
from tests.sdk import connected
from tests.tinker.tenants import ADAM, MODEL, datum, new_key, post, rest_of, train

TOKENS: Final = list(range(7, 40))
STEPS: Final = 3
DONE: Final = 2 * STEPS + 1
"""Operations that have a result when the server is killed."""
WAITING: Final = 3
"""Those that have none."""
LOST: Final = DONE + WAITING + 1
"""One that was acknowledged and never begun, and of which half is lost."""
WITHIN_S: Final = 240.0


class Record(NamedTuple):
    """Where a record lies in its segment."""

    start: int
    stop: int


class Damage(NamedTuple):
    """What becomes of the segment of one lane, what callers are told, and whether operations of the run wait then."""

    lane: str
    harm: Callable[[bytes, list[Record]], bytes]
    told: str
    waits: bool = True


class Tenant(NamedTuple):
    """A run and where its journal lies."""

    run: tinker.TrainingClient
    key: str
    journal: Path

    def segment(self, lane: str) -> Path:
        """The only one of a lane."""
        (found,) = self.journal.glob(f"{lane}-*.seg")
        return found


def payload_flipped(content: bytes, records: list[Record]) -> bytes:
    """A bit in the middle of a record that is not the last."""
    record = records[len(records) // 2]
    return flipped(content, (record.start + HEADER_BYTES + record.stop) // 2)


def header_flipped(content: bytes, records: list[Record]) -> bytes:
    """A bit of the length of a record that is not the last."""
    return flipped(content, records[len(records) // 2].start)


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def cut(content: bytes, records: list[Record]) -> bytes:
    """Half of the last record is missing."""
    return content[: (records[-1].start + records[-1].stop) // 2]


DAMAGES: Final = {
    "an operation": Damage("ops", payload_flipped, "{segment}: record "),
    "the header of an operation": Damage("ops", header_flipped, "{segment}: no record begins at offset "),
    "the last operation, whose result is known": Damage("ops", cut, f"{{segment}}: operation {DONE} at offset ", waits=False),
    "a result": Damage("results", payload_flipped, "{segment}: record "),
    "the header of a result": Damage("results", header_flipped, "{segment}: no record begins at offset "),
}


@pytest.mark.slow
def test_a_damaged_run_says_what_to_mend_the_others_go_on_and_mended_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    port = str(free_port())
    data_dir, backup = tmp_path / "data", tmp_path / "backup"
    # The SDK's clients go on in the second life, and end before it does: without a server their end takes minutes.
    with running_server(data_dir, "--port", port) as server, ExitStack() as opened:
        keys = [server.key, new_key(server, "other", "theirs")]
        mine, other = (opened.enter_context(connected(server, key=key)) for key in keys)
        undisturbed = begun(server, mine, server.key)
        for future in submitted(undisturbed):
            future.result(timeout=WITHIN_S)
        wanted = finished(server, undisturbed)
        assert len({*wanted.values()}) == len(wanted) == 3
        healthy, shortened, forgetful = begun(server, other, keys[1]), begun(server, mine, server.key), begun(server, mine, server.key)
        damaged = {what: begun(server, mine, server.key) for what in DAMAGES}
        os.kill(server.pid(f"engine-{MODEL}"), signal.SIGSTOP)
        waiting = {tenant.journal: submitted(tenant) for tenant in (healthy, shortened, forgetful)}
        waiting |= {tenant.journal: submitted(tenant) if DAMAGES[what].waits else [] for what, tenant in damaged.items()}
        wait_until(lambda: all(extent(journal).last_operation == DONE + len(futures) for journal, futures in waiting.items()))
        assert extent(healthy.journal).last_result == DONE
        step_alone(server, shortened, LOST)
        kill(server)
        clients = opened.pop_all()

    shutil.copytree(data_dir / "runs", backup)
    harmed = {what: harm(tenant, DAMAGES[what].lane, DAMAGES[what].harm) for what, tenant in damaged.items()}
    harm(shortened, "ops", cut)
    harm(forgetful, "results", cut)

    with running_server(data_dir, "--port", port) as server, clients:
        for what, tenant in damaged.items():
            assert_refused(server, tenant, waiting[tenant.journal], DAMAGES[what].told.format(segment=harmed[what].name))
        for tenant in (healthy, shortened, forgetful):
            for future in waiting[tenant.journal]:
                future.result(timeout=WITHIN_S)
        assert_lost_and_taken_again(server, shortened, LOST)
        assert finished(server, healthy) == wanted
        assert_computed_again(server, forgetful, DONE)
        assert finished(server, forgetful) == wanted
        assert digests(server, shortened) == {name: wanted[name] for name in ("begun", "end")}

    for what, tenant in damaged.items():
        saved, whole = backup / tenant.journal.name, tenant.segment("results" if DAMAGES[what].lane == "ops" else "ops")
        assert whole.read_bytes() == (saved / whole.name).read_bytes()
        shutil.rmtree(tenant.journal)
        shutil.copytree(saved, tenant.journal)
    with running_server(data_dir) as server:
        for what, tenant in damaged.items():
            assert_mended(server, tenant, wanted, waits=DAMAGES[what].waits)


def begun(server: LiveServer, client: tinker.ServiceClient, key: str) -> Tenant:
    """A run like any other, and what it has learned so far as a checkpoint."""
    run = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
    train(run, TOKENS, STEPS)
    run.save_state("begun").result()
    with Client(server.url, key) as ours:
        return Tenant(run, key, server.data_dir / "runs" / ours.run(run.model_id).id)


def submitted(tenant: Tenant) -> list["tinker.APIFuture[Any]"]:
    """A step, and a checkpoint of what it gives."""
    run = tenant.run
    return [run.forward_backward([datum(TOKENS)], "cross_entropy"), run.optim_step(ADAM), run.save_state("end")]


def finished(server: LiveServer, tenant: Tenant) -> dict[str | None, str | None]:
    """Hashes of the weights of every checkpoint, after another step."""
    train(tenant.run, TOKENS)
    tenant.run.save_state("later").result(timeout=WITHIN_S)
    return digests(server, tenant)


def digests(server: LiveServer, tenant: Tenant) -> dict[str | None, str | None]:
    with Client(server.url, tenant.key) as ours:
        return {saved.name: saved.digest for saved in ours.run(tenant.run.model_id).checkpoints()}


def step_alone(server: LiveServer, tenant: Tenant, seq: int) -> None:
    """Submit it, as the SDK would, and see it acknowledged."""
    body = {"model_id": tenant.run.model_id, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}}
    answer = post(server, "/optim_step", body, tenant.key)
    assert answer.json()["request_id"] == future_of(tenant, seq)


def kill(server: LiveServer) -> None:
    """All of it, at once."""
    pids = server.pids()
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not any(alive(pid) for pid in pids.values()))


def harm(tenant: Tenant, lane: str, how: Callable[[bytes, list[Record]], bytes]) -> Path:
    """Damage a segment; which."""
    segment = tenant.segment(lane)
    content, records, start = segment.read_bytes(), [], 0
    while start < len(content):
        stop = start + HEADER_BYTES + int.from_bytes(content[start : start + 4], "little")
        records.append(Record(start, stop))
        start = stop
    assert len(records) >= DONE
    segment.write_bytes(how(content, records))
    return segment


def assert_refused(server: LiveServer, tenant: Tenant, waiting: list["tinker.APIFuture[Any]"], told: str) -> None:
    """Whoever waits, asks again or submits is told the same, and so is whoever looks at the run."""
    for future in waiting:
        with pytest.raises(tinker.RequestFailedError) as failed:
            future.result(timeout=WITHIN_S)
        assert failed.value.category.value == "server"
        assert_says(failed.value.message, tenant, told)
    answer = post(server, "/retrieve_future", {"request_id": future_of(tenant, 1)}, tenant.key)
    assert (answer.status_code, answer.json()["category"]) == (200, "server")
    assert_says(answer.json()["error"], tenant, told)
    with pytest.raises(tinker.BadRequestError) as refused:
        tenant.run.optim_step(ADAM).result(timeout=WITHIN_S)
    assert_says(str(refused.value), tenant, told)
    assert rest_of(server, tenant.key).get_training_run(tenant.run.model_id).result().corrupted
    with Client(server.url, tenant.key) as ours:
        state = ours.run(tenant.run.model_id).state()
    assert state.state == "broken"
    assert_says(str(state.error), tenant, told)


def assert_says(message: str, tenant: Tenant, told: str) -> None:
    assert told in message
    assert tenant.journal.name in message
    assert "bring its directory back from a backup" in message
    assert str(tenant.journal.parent) not in message


def assert_lost_and_taken_again(server: LiveServer, tenant: Tenant, seq: int) -> None:
    """What is left of half an operation is nothing, which is said; its number is free for it."""
    answer = post(server, "/retrieve_future", {"request_id": future_of(tenant, seq)}, tenant.key)
    assert answer.status_code == 404
    assert f"has no operation {seq}" in answer.json()["error"]
    assert f"{tenant.segment('ops').name}: dropping what is cut off at offset" in (server.data_dir / "logs" / "api.log").read_text()
    step_alone(server, tenant, seq)
    answer = post(server, "/retrieve_future", {"request_id": future_of(tenant, seq)}, tenant.key)
    assert answer.json()["metrics"]["optimizer_step"] == STEPS + 2


def assert_computed_again(server: LiveServer, tenant: Tenant, seq: int) -> None:
    """Its result, of which half was lost, is what it was."""
    answer = post(server, "/retrieve_future", {"request_id": future_of(tenant, seq)}, tenant.key)
    assert answer.json() == {"type": "save_weights", "path": f"tinker://{tenant.run.model_id}/weights/begun"}
    said = f"run {tenant.journal.name}: the results of operations {seq} to {seq} are lost; they are computed again"
    assert (server.data_dir / "logs" / "api.log").read_text().count(said) == 1


def assert_mended(server: LiveServer, tenant: Tenant, wanted: dict[str | None, str | None], *, waits: bool) -> None:
    """The run is where it was, and what waited is done."""
    last = "end" if waits else "begun"
    with Client(server.url, tenant.key) as ours:
        run = ours.run(tenant.run.model_id)
        wait_until(lambda: last in digests(server, tenant), WITHIN_S)
        again = run.save_checkpoint("again").result(WITHIN_S)
        state = run.state()
    assert (again.digest, state.state, state.error) == (wanted[last], "active", None)
    assert digests(server, tenant) == {name: wanted[name] for name in ("begun", last)} | {"again": wanted[last]}


def future_of(tenant: Tenant, seq: int) -> str:
    return f"operation|{tenant.run.model_id}|{seq}|"
