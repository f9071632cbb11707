"""A small client of a Bloomery server.

    with Client("http://127.0.0.1:8700", api_key="tml-...") as client:
        run = client.create_run("bloomery-tiny", rank=16)
        loss = run.forward_backward(data)          # submitted; the server already works on it
        step = run.optim_step(learning_rate=1e-3)  # submitted behind it, without waiting
        print(loss.result().metrics, step.result().metrics)
        version = run.save_snapshot().result().version
        client.deployments.create("router", version)
        group = client.sampler(version).sample(prompt, num_samples=8, max_tokens=64, seed=1)
        print(group.result().sequences[0].logprobs)

`Client` is the front door, `TrainingRun` the verbs of a run, `Pending` a result to come, `Sampler` what gives rollouts as token ids, `Http` speaks to
the server and survives its restarts.
"""

from bloomery.client.client import Client
from bloomery.client.sample_message import SampledSequence
from bloomery.client.sampling import PendingSample, Sampled, Sampler
from bloomery.client.training import Pending, TrainingRun

__all__ = ["Client", "Pending", "PendingSample", "Sampled", "SampledSequence", "Sampler", "TrainingRun"]
