"""The versions of one set of weights in an object store, each a small step from the one before it, for readers anywhere. No torch.

`publisher` encodes a step and commits it as `manifest` under the next number, while `lease` says that it is the one writer; `published` is what it
knows of the weights before, `spans` what it keeps for merged steps. `receiver` has weights follow the chain: `holding` is what it has, `joining`
fills weights that nobody uses, and `flipping` has changes ready while the old version is used, in a file of `staging`, and writes them between two
steps. `plan` holds manifests against each other and finds the shortest way to a version, `download` fetches what lies on it, `decode` follows a chunk
along it. `recovery` finds out what a dead process left, `repair` makes chunks anew, with the hashes of `parts`, and `state` is what outlives a
process. `retention` removes what nobody can need, `readers` say what they do. `keys` signs, `objects` names objects by what they contain.
"""
