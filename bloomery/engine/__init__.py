"""The engine process of one base model: operations and requests in, results and tokens out.

`process` puts it together. `server` owns the socket, on the event loop of the main thread. `executor` owns everything that is made of tensors, on one
other thread: it takes commands from an inbox and alternates between steps of the sampler and micro-batches of the runs (`hosted`). `shelf` is
where runs keep checkpoints and snapshots, and where the sampler finds adapters. Nothing here is durable but those blobs.
"""
