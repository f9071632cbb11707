"""Verbs, without HTTP: what the routes of every contract call.

`core` composes them. `auth` turns keys into a `principal`, `identity` signed `tokens` that stand for keys.

Training: `runs` takes operations for what `validate` allows (`run_rows`), with the `custom_losses` that clients defined. `activity` knows the runs
in use. Each `active` run journals operations in its `history`, as far as its `backlog` has room, has its base's engine execute them in order at its
`place` there, and settles results into rows (`settle`), which `run_metrics` reads; what is computed again must come to the same (`replayed`).
`engines` are spoken to (`engine_connection`, and an `engine_stream` for each request) as long as their `pulse` is felt.

Weights: `checkpoints` finds what runs saved, `publishing` shares it, `exports` and `external` hand it to other programs, `versions` and `deployments`
are what is served, of which `staging` sees to it that it can be. `sessions` are those of SDK clients with their samplers, which `session_search`
looks through. `kinds` are the words of their rows, `held` says which blobs rows keep; `ephemeral` expires weights that nobody keeps, and `garbage`
deletes what no row names. `fidelity` measures what is published against its trainer, of which its `listeners` hear.

Serving: a name means a `target` on one of the `models`, which the `fleet` of engines and replicas holds; `rendering` makes tokens of messages,
`sampling` streams, `stopping` finds stop strings, `tool_use` reads what tools are called, and work on large bodies goes to `threads`. `limits` says
what a key may still use, `meters` measures what is served and bounds what waits. `traffic` records it (`span_rows`, after `redaction`), `feedback`
judges it, and `curation` makes of both what `datasets` keeps (`dataset_rows`, without near-duplicates: `shingles`). `audit` looks back. `repeats`
knows what was answered to whom, so that nothing is done twice.
"""
