"""Training of one run: operations in, results out, the same bits however often they are replayed.

`run.TrainableRun` executes operations. `batch` packs data into micro-batches, `losses` are functions of log-probabilities, `lora` holds masters and
gradients, `optim` steps them, `checkpoint` and `snapshot` turn state into bytes and back.
"""
