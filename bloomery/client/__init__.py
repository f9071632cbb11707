"""A small client of a Bloomery server.

    with Client("http://127.0.0.1:8700", api_key="tml-...") as client:
        run = client.create_run("bloomery-tiny", rank=16)
        loss = run.forward_backward(data)          # submitted; the server already works on it
        step = run.optim_step(learning_rate=1e-3)  # submitted behind it, without waiting
        print(loss.result().metrics, step.result().metrics)
        client.deployments.create("router", run.save_snapshot().result().version)

`Client` is the front door, `TrainingRun` the verbs of a run, `Pending` a result to come, `Http` speaks to the server and survives its restarts.
"""

from bloomery.client.client import Client
from bloomery.client.training import Pending, TrainingRun

__all__ = ["Client", "Pending", "TrainingRun"]
