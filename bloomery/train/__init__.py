"""Training of one run: operations in, results out, the same bits however often they are replayed.

`run.TrainableRun` executes operations and asks for its micro-batches as shares of `passes`. `batch` packs data, `losses` are functions of
log-probabilities, `custom` computes those that callers define, with `operators`. `lora` and `full` hold masters and gradients, two kinds of one
`trainable`; `optim` steps them, `outputs` are what callers get, `checkpoint` and `snapshot` turn state into bytes and back.
"""
