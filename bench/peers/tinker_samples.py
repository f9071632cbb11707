"""Sample through whatever `tinker` SDK is installed; print seconds per round as JSON.

`tinker_samples.py URL KEY MODEL PROMPTS PROMPT_TOKENS SAMPLES NEW_TOKENS ROUNDS`: a round asks for `SAMPLES` continuations of each of `PROMPTS`
prompts at once, with the fresh weights of a run of rank 8. Every round has prompts of its own, the same ones whoever answers.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import tinker
from tinker import types


def main(url: str, key: str, model: str, prompts: int, prompt_tokens: int, samples: int, new_tokens: int, rounds: int) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    run = settled(service.create_lora_training_client(base_model=model, rank=8))
    sampler = settled(run.save_weights_and_get_sampling_client())
    noise = np.random.default_rng(0)
    seconds = []
    for number in range(rounds):
        asked = [types.ModelInput.from_ints(noise.integers(5, 4000, prompt_tokens).tolist()) for _ in range(prompts)]
        # Nothing but the length ends a sample.
        params = types.SamplingParams(max_tokens=new_tokens, temperature=1.0, seed=number, stop=[])
        began = time.perf_counter()
        futures = [sampler.sample(prompt, num_samples=samples, sampling_params=params) for prompt in asked]
        answers = [future.result() for future in futures]
        seconds.append(time.perf_counter() - began)
        sampled = sum(len(sequence.tokens) for answer in answers for sequence in answer.sequences)
        if sampled != prompts * samples * new_tokens:
            raise SystemExit(f"{sampled} tokens came back, not {prompts * samples * new_tokens}")
    print(json.dumps({"seconds": seconds}))


def settled(client: Any) -> Any:
    """Newer SDKs give a future of a client."""
    return client.result() if hasattr(client, "result") else client


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:9]))
