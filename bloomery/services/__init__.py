"""Verbs, without HTTP: what the routes of every contract call.

`core` composes them. `auth` turns keys into principals, `identity` tokens that stand for keys. `runs` takes operations; an `active` run journals
them, has its base's engine (`engines`) execute them in order and settles their results into rows (`settle`). `checkpoints` finds what runs saved,
`publishing` shares it, `exports` and `external` hand it to other programs, `versions` and `deployments` are what is served, `sampling` streams from
it, `traffic` and `feedback` record it, and `datasets` curates what to train on next. `audit` and `session_search` look back.
"""
