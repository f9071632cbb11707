"""Training on a disk that is full: what cannot be kept is refused by name, the engine lives or comes back, and with room the run ends as ever.

The server's data lie on a small file system of its own, in a namespace of its own; the engine may write to no file at all meanwhile, not even over
what is there, as on a file system that never writes in place.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
SMALL_DISK = ["sh", "-c", 'mount -t tmpfs -o size=128m none "$1" && shift && exec "$@"', "sh"]
TRAIN_ON_A_FULL_DISK = """
import json, os, resource, signal, sys, threading
from contextlib import suppress
from pathlib import Path

import httpx
import tinker
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from bloomery.client import Client
from tests.live import running_server, wait_until

STEPS, disk = 3, Path(sys.argv[1])
ballast, found = disk / "ballast", {}
# More than the rest of a page of the journal's last segment.
DATA = [types.Datum(model_input=types.ModelInput.from_ints(list(range(1, 40))),
                    loss_fn_inputs={"target_tokens": list(range(2, 41)), "weights": [1.0] * 39})] * 20
ADAM = types.AdamParams(learning_rate=1e-3)

def leave(free):
    status = os.statvfs(disk)
    # The server writes meanwhile: what it took is not there to be filled.
    with suppress(OSError), ballast.open("ab") as file:
        file.write(bytes(max(0, status.f_bavail * status.f_frsize - free)))

def limit(server, most):
    for pid in engine_of(server), server.process.pid:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

def engine_of(server):
    # What the supervisor writes of its children is behind the times on a full disk.
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            # One that has just died is gone while it is looked at.
            with suppress(FileNotFoundError, ProcessLookupError):
                if b"bloomery.engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid

def steps(run, count):
    for _ in range(count):
        run.forward_backward(DATA, "cross_entropy")
        run.optim_step(ADAM).result()

def saved(run, name):
    return run.save_state(name).result().path

def refused(run):
    # Checkpoints that are superfluous by now may go meanwhile, and make room.
    for attempt in range(10):
        leave(1 << 20)
        try:
            saved(run, f"no-room-{attempt}")
        except tinker.RequestFailedError as error:
            return [str(error), error.category.value]

with running_server(disk / "data", env={"BLOOMERY_CHECKPOINT_SECONDS": "0"}) as server:
    with tinker.ServiceClient(base_url=server.url, api_key=server.key) as sdk, Client(server.url, server.key, patience_s=0) as ours:
        undisturbed, run = (sdk.create_lora_training_client(base_model="bloomery-tiny", rank=8, seed=1) for _ in range(2))
        undisturbed, run = undisturbed.result(), run.result()
        steps(undisturbed, 3 * STEPS + 1)
        saved(undisturbed, "end")
        steps(run, STEPS)

        # Room for operations, none for weights.
        found["no room for weights"] = refused(run)
        steps(run, STEPS)

        # Room for nothing, and the engine dies.
        leave(0)
        limit(server, 0)
        before = engine_of(server)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: engine_of(server) not in (None, before) and ours.status().engines[0].ready)
        found["engines"] = [before, engine_of(server)]
        # The SDK repeats what is refused so, in silence; the operation that it sends meanwhile is told here what it is told.
        asked = types.ForwardBackwardInput(data=DATA, loss_fn="cross_entropy")
        asked = types.ForwardBackwardRequest(forward_backward_input=asked, model_id=run.model_id, seq_id=1000)
        headers = {"x-api-key": server.key, "content-type": "application/x-protobuf"}
        body = forward_backward_request_to_proto(asked).SerializeToString()
        # Whatever went when the engine came back left room.
        leave(0)
        answer = httpx.post(f"{server.url}/api/v1/forward_backward", content=body, headers=headers, timeout=120)
        found["no room for operations"] = [answer.status_code, answer.json()]
        waiting = threading.Thread(target=steps, args=(run, 1))
        waiting.start()
        waiting.join(3)
        found["waits"] = waiting.is_alive()

        limit(server, resource.RLIM_INFINITY)
        ballast.unlink()
        waiting.join(240)
        found["still waits"] = waiting.is_alive()
        steps(run, STEPS)
        saved(run, "end")
        checkpoints = [next(each for each in ours.run(one.model_id).checkpoints() if each.name == "end") for one in (undisturbed, run)]
        found["digests"], found["steps"] = [each.digest for each in checkpoints], [each.step for each in checkpoints]
        found["supervisor lives"] = server.process.poll() is None
        found["engines"].append(engine_of(server))
    found["log"] = "".join(log.read_text() for log in (disk / "data" / "logs").glob("engine*.log"))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_training_waits_for_room_on_a_full_disk_and_ends_with_the_same_bits(tmp_path):
    if subprocess.run([*IN_A_NAMESPACE, *SMALL_DISK, str(tmp_path), "true"], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("this machine gives no namespaces, in which a file system can be mounted, to whoever is no administrator")
    argv = [*IN_A_NAMESPACE, *SMALL_DISK, str(tmp_path), sys.executable, "-c", TRAIN_ON_A_FULL_DISK, str(tmp_path)]
    child = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=540)
    assert child.returncode == 0, child.stderr + child.stdout
    found = json.loads(child.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1).replace("\\n", "\n"))
    message, category = found["no room for weights"]
    assert "No space left on device" in message
    assert category == "server"
    status, told = found["no room for operations"]
    assert (status, told["category"], told["code"]) == (503, "server", "unavailable")
    assert "operation 1000 cannot be journaled: [Errno 28] No space left on device" in told["error"]
    assert (found["waits"], found["still waits"]) == (True, False)
    assert found["supervisor lives"]
    first, second, last = found["engines"]
    assert first != second == last
    assert found["steps"] == [10, 10]
    assert found["digests"][0] == found["digests"][1]
    assert "no checkpoint could be written; training goes on" in found["log"]
    assert ".in-hand can be written again (before: [Errno 27] File too large)" in found["log"]
