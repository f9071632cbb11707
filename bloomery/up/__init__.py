"""`bloomery up`: everything on one machine, started and kept running by a process without torch.

`start` composes: `base_models` checks what is to be served against the machine, `cores` divides its processors, `lock` takes the data directory,
which `layout` and `tables` bring up to date, `keys` provides the development key and `chain_keys` the one that signs chains, then a `Supervisor`
keeps each `Child` alive, asks the api for its `health`, and stops all of them when it is told to.
`control` is the running server seen from outside (stop, status, logs), `backup` makes and restores archives, `offline` does what needs no server.
"""
