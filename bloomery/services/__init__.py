"""Verbs, without HTTP: what the routes of every contract call.

`core` composes them. `access`: who calls, and what a key allows. `engines`: the processes that compute, as the api sees them. `training`: runs, their
histories and what they save. `weights`: what is published, named and served. `serving`: samples and the tokens that they begin with. `grading`:
graders under their names, and what they say. `clients`: what SDK clients have here. `data`: recorded traffic, judgements of it, files and data sets.
`batches`: files of requests that are answered when there is time. `evaluations`: what models answer to rows, and what graders say of it. `jobs`:
managed training. `housekeeping`: what is looked back at, and what goes.

Each package imports some of those before it (`tests/test_layers.py` says which). All share `kinds`, the words of rows on checkpoints and runs;
`held`, which says which blobs of weights rows keep; `needed`, which says what jobs that have not ended keep; `one_row`, which finds what somebody
names; `listeners`, who hear of a change; and `threads`, to which work on large bodies goes.
"""
