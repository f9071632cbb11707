"""Tenants that train, save, sample and save again through the tinker SDK, one of them all parameters; one JSON line at the end says everything that
came out.

`python -m tests.kill.workload URL KEY TENANTS [--poisoned TENANT] [--until FILE]`. Lines before the last are a diary: `submitted N` and `done N`
of each tenant with a time, so that a test can prove which operations were in flight when something died. The tenants have different ranks, trained
parts, losses and lengths, and each has a few operations in flight at a time; one that is poisoned submits forwards of its own, up to operation
`POISON`, and may see the last of them fail. With a file to wait for they go on after the end until it is there, so that what is to happen to them
meanwhile finds them at work.
"""

import hashlib
import json
import os
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import tinker
from tinker import types

from bloomery.client import Client

STEPS: Final = 12
PUBLISHES: Final = (1, 4, 7, 10)
"""After these steps."""
OPERATIONS: Final = 2 * STEPS + len(PUBLISHES) + 2
"""Of a tenant: steps, snapshots, a checkpoint in the middle, and the checkpoint at the end."""
MORE: Final = "more-"
"""What snapshots after the end are called."""
MORE_STEPS: Final = 40
"""At most, with a snapshot each, after the end: what is waited for did not come then."""
POISON: Final = OPERATIONS + 1
"""No other tenant has so many."""
IN_FLIGHT: Final = 4
"""Of a tenant at a time."""
ROWS: Final = 6
VOCABULARY: Final = 1000
RANKS: Final = (8, 0, 1, 24)
PARTS: Final[tuple[Mapping[str, bool], ...]] = tuple(map(MappingProxyType, ({}, {}, {"train_mlp": False}, {"train_unembed": False})))
TOKENS: Final = (48, 20, 33, 70)
ADAM: Final = types.AdamParams(learning_rate=3e-3)
_WRITING = threading.Lock()


def main(arguments: Sequence[str]) -> None:
    """Run all tenants at once."""
    parser = ArgumentParser()
    for name, kind in {"url": str, "key": str, "tenants": int, "--poisoned": int, "--until": Path}.items():
        parser.add_argument(name, type=kind)
    given = parser.parse_args(arguments)

    def train(tenant: int) -> dict[str, Any]:
        return Tenant(given.url, given.key, tenant).train(given.poisoned == tenant, given.until)

    with ThreadPoolExecutor(given.tenants) as threads:
        print(json.dumps(list(threads.map(train, range(given.tenants)))))


class Tenant:
    """One run and its operations, the oldest of which are waited for before more are submitted."""

    def __init__(self, url: str, key: str, number: int) -> None:
        self._url, self._key, self._number = url, key, number
        self._pending: list[tinker.APIFuture[Any]] = []
        self._lost: tinker.APIFuture[Any] | None = None

    def train(self, poisoned: bool, until: Path | None) -> dict[str, Any]:
        """Everything; what came of it up to the end."""
        number = self._number
        with tinker.ServiceClient(base_url=self._url, api_key=self._key) as client:
            rank, parts = RANKS[number % len(RANKS)], PARTS[number % len(PARTS)]
            run = client.create_lora_training_client("bloomery-tiny", rank=rank, seed=number + 1, **parts).result()
            for step in range(STEPS):
                self._submit(lambda step=step: learn(run, number, step))
                self._submit(lambda: run.optim_step(ADAM))
                if step == STEPS // 2:
                    self._submit(lambda: run.save_state("middle"))
                if step in PUBLISHES:
                    # The SDK numbers it on a thread of its own: what is submitted before it is done may come before it.
                    self._submit(lambda step=step: run.save_weights_for_sampler(f"step-{step}")).result()
            failure = self._taste(run) if poisoned else None
            self._submit(lambda: run.save_state("end"))
            submitted = len(self._pending)
            if until is not None:
                self._go_on(run, until)
            results = [future.result() for future in self._pending if future is not self._lost][:submitted]
            paths = [result.path for result in results if isinstance(result, types.SaveWeightsForSamplerResponse)]
            prompt, params = types.ModelInput.from_ints([5, 17, 300, 42]), types.SamplingParams(max_tokens=8, temperature=1.0, seed=5, stop=[])
            answers = [client.create_sampling_client(path).result().sample(prompt, 1, params).result() for path in paths]
            model_id = run.get_info().model_id
        return {
            "digests": self._digests(model_id),
            "learned": [told(result) for result in results if isinstance(result, types.ForwardBackwardOutput)][:STEPS],
            "steps": [result.metrics for result in results if isinstance(result, types.OptimStepResponse)],
            "said": [answer.sequences[0].tokens for answer in answers],
            "failure": failure,
        }

    def _go_on(self, run: tinker.TrainingClient, until: Path) -> None:
        for step in range(STEPS, STEPS + MORE_STEPS):
            if until.exists():
                return
            self._submit(lambda step=step: learn(run, self._number, step))
            self._submit(lambda: run.optim_step(ADAM))
            self._submit(lambda step=step: run.save_weights_for_sampler(f"{MORE}{step}")).result()

    def _submit(self, begin: Callable[[], "tinker.APIFuture[Any]"]) -> "tinker.APIFuture[Any]":
        if len(self._pending) >= IN_FLIGHT:
            self._pending[-IN_FLIGHT].future().exception()
        seq = len(self._pending) + 1
        diary("submitted", self._number, seq)
        future = begin()
        future.future().add_done_callback(lambda _: diary("done", self._number, seq))
        self._pending.append(future)
        return future

    def _taste(self, run: tinker.TrainingClient) -> str | None:
        """Submit up to operation `POISON`; the failure it ends with, if it does."""
        while len(self._pending) < POISON:
            last = self._submit(lambda: run.forward([supervised([1, 2, 3, 4])], "cross_entropy"))
        try:
            last.result()
        except tinker.RequestFailedError as error:
            self._lost = last
            return f"{error.category.value}: {error.message}"
        return None

    def _digests(self, model_id: str) -> dict[str, str | None]:
        """Hashes of the weights of every checkpoint, which the SDK does not tell."""
        with Client(self._url, self._key, patience_s=120) as client:
            named = {str(saved.name): saved.digest for saved in client.run(model_id).checkpoints() if saved.kind == "named"}
        return {name: digest for name, digest in named.items() if not name.startswith(MORE)}


def learn(run: tinker.TrainingClient, tenant: int, step: int) -> "tinker.APIFuture[types.ForwardBackwardOutput]":
    """The tenant's batch of this step: supervised, or for every other tenant weighted by advantages."""
    random = np.random.default_rng([tenant, step])
    rows = [random.integers(0, VOCABULARY, TOKENS[tenant % len(TOKENS)]).tolist() for _ in range(ROWS)]
    if tenant % 2 == 0:
        return run.forward_backward([supervised(row) for row in rows], "cross_entropy")
    return run.forward_backward([rollout(row, random) for row in rows], "importance_sampling")


def supervised(tokens: list[int]) -> types.Datum:
    """An example whose every token counts."""
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def rollout(tokens: list[int], random: np.random.Generator) -> types.Datum:
    """The same as if it had been sampled."""
    count = len(tokens) - 1
    numbers = {"logprobs": random.normal(-7, 0.5, count).tolist(), "advantages": random.normal(0, 1, count).tolist()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **numbers})


def told(result: types.ForwardBackwardOutput) -> list[Any]:
    """The metrics, and a hash of every bit of the outputs."""
    bits = hashlib.sha256()
    for output in result.loss_fn_outputs:
        for name in sorted(output):
            bits.update(output[name].to_numpy().tobytes())
    return [bits.hexdigest(), dict(sorted(result.metrics.items()))]


def diary(what: str, tenant: int, seq: int) -> None:
    """One line with a time that other processes of this machine can compare."""
    with _WRITING:
        print(json.dumps({what: seq, "tenant": tenant, "at": time.time()}), flush=True)


if __name__ == "__main__":
    # The SDK reports to the server it talks to, which is not what is tested here.
    os.environ["TINKER_TELEMETRY"] = "0"
    main(sys.argv[1:])
