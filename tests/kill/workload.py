"""Tenants that train, save, sample and save again through the public API; one JSON line at the end says everything that came out.

`python -m tests.kill.workload URL KEY TENANTS [POISONED]`. Lines before the last are a diary: `accepted N` and `done N` of each tenant with a time,
so that a test can prove that operations were in flight when something died. The tenants have different ranks, losses and lengths; one that is
poisoned submits forwards of its own, up to operation `POISON`, and may see the last of them fail.
"""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bloomery.client import Client
from bloomery.client.training import Pending, TrainingRun
from bloomery.recipes.sft import datum
from bloomery.types.arrays import Array
from bloomery.types.errors import BloomeryError
from bloomery.types.operations import Datum

STEPS = 14
ROWS = 6
VOCABULARY = 1000
RANKS = (8, 1, 24, 5)
TOKENS = (48, 20, 70, 33)
_WRITING = threading.Lock()
POISON = 2 * STEPS + 4
"""No other tenant has so many operations: steps, a checkpoint, a snapshot, and the checkpoint at the end."""


def main(url: str, key: str, tenants: int, poisoned: int | None) -> None:
    """Run all tenants at once."""
    with ThreadPoolExecutor(tenants) as threads:
        reports = list(threads.map(lambda tenant: train(url, key, tenant, poisoned == tenant), range(tenants)))
    print(json.dumps(reports))


def train(url: str, key: str, tenant: int, poisoned: bool) -> dict[str, Any]:
    """One tenant's operations."""
    with Client(url, key, patience_s=120) as client:
        run = client.create_run("bloomery-tiny", rank=RANKS[tenant % len(RANKS)], seed=tenant + 1, name=f"victim-{tenant}")
        pending: list[Pending[Any]] = []
        for step in range(STEPS):
            pending.append(learn(run, tenant, step))
            pending.append(run.optim_step(1e-2))
            if step == STEPS // 2:
                pending.append(run.save_checkpoint("middle"))
                pending.append(run.save_snapshot("middle"))
            diary("accepted", tenant, pending[-1].seq)
            if step > STEPS // 2:
                # Half of it one after the other, so that the journal moves on while checkpoints are written.
                pending[-1].result()
                diary("done", tenant, pending[-1].seq)
        results = []
        for each in pending:
            results.append(each.result())
            diary("done", tenant, each.seq)
        losses = [result.metrics["loss:sum"] for result in results if "loss:sum" in getattr(result, "metrics", {})]
        snapshot = next(result for result in results if hasattr(result, "version"))
        answer = client.chat(snapshot.version, [{"role": "user", "content": "def get(self, name)"}], max_tokens=8, temperature=1.0, seed=5)
        failure = taste(run) if poisoned else None
        end = run.save_checkpoint("end").result()
    said = answer["choices"][0]["message"]["content"]
    return {"digest": end.digest, "step": end.step, "losses": losses, "weights": snapshot.key, "said": said, "failure": failure}


def learn(run: TrainingRun, tenant: int, step: int) -> Pending[Any]:
    """The tenant's batch of this step: supervised, every other time without log-probabilities, or for every other tenant weighted by advantages."""
    random = np.random.default_rng([tenant, step])
    length = TOKENS[tenant % len(TOKENS)]
    rows = [datum(random.integers(0, VOCABULARY, length).tolist(), [0.0] + [1.0] * (length - 1)) for _ in range(ROWS)]
    if tenant % 2 == 0:
        return run.forward_backward(rows, logprobs=step % 2 == 0)
    return run.forward_backward([rollout(row, random) for row in rows], loss="importance_sampling")


def rollout(row: Datum, random: np.random.Generator) -> Datum:
    """The same tokens as if they had been sampled."""
    count = row.tokens.shape[0]
    numbers = {"logprobs": random.normal(-7, 0.5, count), "advantages": random.normal(0, 1, count)}
    inputs = {"target_tokens": row.inputs["target_tokens"], **{name: Array.of(values.astype(np.float32)) for name, values in numbers.items()}}
    return Datum(tokens=row.tokens, inputs=inputs)


def taste(run: TrainingRun) -> str | None:
    """Submit up to operation `POISON`; the failure it ends with, if it does."""
    rows = [datum([1, 2, 3, 4], [0.0, 1.0, 1.0, 1.0])]
    run.forward(rows).result()
    last = run.forward(rows)
    assert last.seq == POISON, last.seq
    try:
        last.result()
    except BloomeryError as error:
        return f"{error.category}: {error.message}"
    return None


def diary(what: str, tenant: int, seq: int) -> None:
    """One line with a time that other processes of this machine can compare."""
    with _WRITING:
        print(json.dumps({what: seq, "tenant": tenant, "at": time.time()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
