"""Train, save, sample and save again through the public API; print one JSON line of everything that came out.

`python -m tests.kill.workload URL KEY SEED`. Lines before the last are a diary: `accepted N` and `done N` with a time, so that a test can
prove that operations were in flight when something died.
"""

import json
import sys
import time

import numpy as np

from bloomery.client import Client
from bloomery.recipes.sft import datum

STEPS = 14
ROWS, TOKENS = 6, 48
VOCABULARY = 1000


def main(url: str, key: str, seed: int) -> None:
    """Run the workload once."""
    random = np.random.default_rng(seed)
    with Client(url, key, patience_s=120) as client:
        run = client.create_run("bloomery-tiny", rank=8, seed=seed, name="victim")
        pending = []
        for step in range(STEPS):
            rows = [datum(random.integers(0, VOCABULARY, TOKENS).tolist(), [0.0] + [1.0] * (TOKENS - 1)) for _ in range(ROWS)]
            pending.append(run.forward_backward(rows))
            pending.append(run.optim_step(1e-2))
            if step == STEPS // 2:
                pending.append(run.save_checkpoint("middle"))
                pending.append(run.save_snapshot("middle"))
            diary("accepted", pending[-1].seq)
            if step > STEPS // 2:
                # Half of it one after the other, so that the journal moves on while checkpoints are written.
                pending[-1].result()
                diary("done", pending[-1].seq)
        results = []
        for each in pending:
            results.append(each.result())
            diary("done", each.seq)
        losses = [result.metrics["loss:sum"] for result in results if "loss:sum" in getattr(result, "metrics", {})]
        snapshot = next(result for result in results if hasattr(result, "version"))
        answer = client.chat(snapshot.version, [{"role": "user", "content": "def get(self, name)"}], max_tokens=8, temperature=1.0, seed=5)
        end = run.save_checkpoint("end").result()
        said = answer["choices"][0]["message"]["content"]
    print(json.dumps({"digest": end.digest, "step": end.step, "losses": losses, "weights": snapshot.key, "said": said}))


def diary(what: str, seq: int) -> None:
    """One line with a time that other processes of this machine can compare."""
    print(json.dumps({what: seq, "at": time.time()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
