"""A supervisor with small programs in place of the api, the engine and a replica: `python -m tests.up.stand_in DIR [their codes]`.

The programs append to DIR/events what happens to them; each is ready once DIR/ready-NAME exists, and has listened once it touched DIR/NAME.sock. The
replica is wanted once DIR/wanted exists, and says nothing once DIR/silent does. Where DIR/rollouts exists there is a replica for rollouts too, which
runs from the start.
"""

import sys
from pathlib import Path

from bloomery.types.errors import WorkerError
from bloomery.up.children import Child, Program
from bloomery.up.cores import Placement
from bloomery.up.health import Health
from bloomery.up.supervisor import Supervisor

OBEDIENT = """
import pathlib, signal, sys
def leave(*_):
    with open("events", "a") as events:
        events.write(f"{sys.argv[1]} stopped\\n")
    sys.exit()
signal.signal(signal.SIGTERM, leave)
pathlib.Path("ready-" + sys.argv[1]).touch()
while True:
    signal.pause()
"""
STUBBORN = OBEDIENT.replace("leave)", "signal.SIG_IGN)")
BROKEN = "import sys; sys.exit('cannot open the model')"


def main(directory: Path, api_code: str = OBEDIENT, engine_code: str = OBEDIENT, replica_code: str = OBEDIENT) -> None:
    def child(name: str, code: str) -> Child:
        argv = [sys.executable, "-c", f"import os; os.chdir({str(directory)!r})\n{code}", name]
        return Child(Program(name=name, argv=argv, env={}, log=directory / f"{name}.log", socket=directory / f"{name}.sock"))

    def ask() -> Health:
        late = frozenset() if (directory / "ready-engine").exists() else frozenset({"tiny"})
        wanted = frozenset({"base"}) if (directory / "wanted").exists() else frozenset()
        ready = frozenset(name for name in ("replica-tiny-0", "rollouts-tiny-0") if (directory / f"ready-{name}").exists())
        silent = frozenset({"replica-tiny-0"}) if (directory / "silent").exists() else frozenset()
        return Health((directory / "ready-api").exists(), late, wanted, ready, silent)

    engines = {child("engine", engine_code): frozenset({"tiny"})}
    replicas = {child("replica-tiny-0", replica_code): "base"}
    rollouts = [child("rollouts-tiny-0", replica_code)] if (directory / "rollouts").exists() else []
    supervisor = Supervisor(
        child("api", api_code),
        engines,
        replicas,
        rollouts,
        wanted=frozenset(),
        engine_placement=Placement(),
        ask=ask,
        state_file=directory / "processes.json",
        say=lambda line: print(line, flush=True),
    )
    try:
        supervisor.run(ready_within_s=120, on_ready=lambda: print("READY", flush=True))
    except WorkerError as error:
        sys.exit(error.message)
    print("DONE", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
