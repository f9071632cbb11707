"""The engine process of one base model: operations and requests in, results and tokens out.

`process` puts it together. `server` owns the socket, on the event loop of the main thread. `executor` owns everything that is made of tensors, on one
other thread: it takes commands from an inbox and alternates between steps of the sampler and passes of `training`, which gives the runs (`hosted`)
their turns. `runs` holds them, or refuses them where the same program is a replica. `admission` refuses what cannot fit, `ledger` remembers what
killed an engine. `shelf` is where runs keep checkpoints and snapshots, and where the sampler finds weights; those of whole models travel by `chains`.
Nothing here is durable but those blobs, the chains and the ledger.
"""
