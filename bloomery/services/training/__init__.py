"""Runs, from an accepted operation to its settled result.

`runs` takes operations for what `validate` allows (`run_rows`); `activity` knows the runs in use. Each `active` run journals operations in its
`history`, as far as its `backlog` has room, has its base's engine execute them in order at its `place` there, and settles results into rows
(`settle`), which `run_metrics` reads; what is computed again must come to the same (`replayed`). `checkpoints` finds what runs saved.
`rollouts` keeps what steps were trained on, `recorded` packs and reads it, and `rollout_texts` shows it in words.
"""
