"""Words of the domain, shared by every process: data only, no torch, no sockets, no database.

`operations` holds what a training run's history consists of, results included; `generation` is what a sampler is asked and answers, and
`kept` many of its answers in one; `protocol` is the conversation between api and engine; `resources` is what `/api/v1` shows; `errors` is the one
error tree.
"""
