"""Moving weights: `manifest` says what a snapshot is, its hash is the version's identity; `publish` stores both.

`export` and `peft` show a version as the files of other programs. No torch here.
"""
