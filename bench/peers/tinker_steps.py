"""Train through whatever `tinker` SDK is installed; print what a number of steps took as JSON.

`tinker_steps.py URL KEY MODEL LOSS SEQUENCES TOKENS WARM_UP STEPS AHEAD...`: a step is `forward_backward` and `optim_step`. AHEAD is what is
submitted before a step's results are awaited: `nothing`, the next step's `forward`, or `all` steps. One run does them in turn; each begins with so
many steps to warm up, and its clock starts when the last of these is done.
"""

import json
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import tinker
from tinker import types


def main(url: str, key: str, model: str, loss: str, sequences: int, tokens: int, warm_up: int, steps: int, *forms: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    run = service.create_lora_training_client(base_model=model, rank=8)
    # Newer SDKs give a future of a client.
    run = run.result() if hasattr(run, "result") else run
    noise = np.random.default_rng(0)
    data = [datum(noise.integers(5, 4000, tokens + 1).tolist(), loss) for _ in range(sequences)]
    found = {}
    for ahead in forms:
        train(run, data, loss, warm_up, ahead)
        began = time.perf_counter()
        losses = train(run, data, loss, steps, ahead)
        found[ahead] = {"seconds": time.perf_counter() - began, "losses": losses}
    print(json.dumps(found))


def train(run: Any, data: list[types.Datum], loss: str, steps: int, ahead: str) -> list[float]:
    """The mean loss of each step; returns once the last has its results."""
    computed, stepped, losses = deque(), deque(), []
    for number in range(steps):
        # It may have been submitted ahead of the step before.
        if number == len(losses) + len(computed):
            computed.append(run.forward_backward(data, loss))
        stepped.append(run.optim_step(types.AdamParams(learning_rate=1e-3)))
        if ahead == "forward" and number + 1 < steps:
            computed.append(run.forward_backward(data, loss))
        if ahead != "all":
            losses.append(settled(computed.popleft(), stepped.popleft()))
    return losses + [settled(*pair) for pair in zip(computed, stepped, strict=True)]


def settled(computed: Any, stepped: Any) -> float:
    outputs = computed.result().loss_fn_outputs
    stepped.result()
    return -float(np.mean([np.mean(output["logprobs"].to_numpy()) for output in outputs]))


def datum(tokens: list[int], loss: str) -> types.Datum:
    ones = [1.0] * (len(tokens) - 1)
    factors = {"weights": ones} if loss == "cross_entropy" else {"logprobs": [-8.3] * len(ones), "advantages": ones}
    inputs = {"target_tokens": tokens[1:], **factors}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(int, sys.argv[5:9]), *sys.argv[9:])
