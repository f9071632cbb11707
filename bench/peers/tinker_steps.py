"""Train through whatever `tinker` SDK is installed; print seconds per step as JSON: `tinker_steps.py URL KEY MODEL LOSS SEQUENCES TOKENS STEPS`."""

import json
import sys
import time

import numpy as np
import tinker
from tinker import types


def main(url: str, key: str, model: str, loss: str, sequences: int, tokens: int, steps: int) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    run = service.create_lora_training_client(base_model=model, rank=8)
    if not hasattr(run, "get_info"):
        run = run.result()
    noise = np.random.default_rng(0)
    data = [datum(noise.integers(5, 4000, tokens + 1).tolist(), loss) for _ in range(sequences)]
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        computed, stepped = run.forward_backward(data, loss), run.optim_step(types.AdamParams(learning_rate=1e-3))
        outputs = computed.result().loss_fn_outputs
        stepped.result()
        seconds.append(time.perf_counter() - began)
    last = -float(np.mean([np.mean(output["logprobs"].to_numpy()) for output in outputs]))
    print(json.dumps({"seconds": seconds, "loss": last}))


def datum(tokens: list[int], loss: str) -> types.Datum:
    ones = [1.0] * (len(tokens) - 1)
    factors = {"weights": ones} if loss == "cross_entropy" else {"logprobs": [-8.3] * len(ones), "advantages": ones}
    inputs = {"target_tokens": tokens[1:], **factors}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(int, sys.argv[5:8]))
