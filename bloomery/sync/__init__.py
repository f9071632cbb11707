"""Moving weights: `manifest` says what a snapshot is, its hash is the version's identity; `publish` stores both.

`live` reads back what a process computes with, `state_hash` hashes it, `proof` holds it against a manifest, of a base model against `base`. `export`
and `peft` show a version as the files of other programs, `tokenizer` names those that turn texts into tokens. `codec/` says what changed from one set
of weights to the next, `foreign/` reads and writes that as another program does, and `chain/` has it reach readers anywhere. `run_chain` finds the
versions of a run in a chain, and makes blobs of them; `torch_weights` are tensors of torch that a chain publishes or changes.
"""
