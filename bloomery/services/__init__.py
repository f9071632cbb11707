"""Verbs, without HTTP: what the routes of every contract call.

`core` composes them. `auth` turns keys into principals. `runs` takes operations; an `active` run journals them, has its base's engine (`engines`)
execute them in order and settles their results into rows (`settle`). `checkpoints` finds what runs saved, `versions` and `deployments` what is
served, `sampling` streams from it, `traffic` and `feedback` record it, and `datasets` curates what to train on next.
"""
