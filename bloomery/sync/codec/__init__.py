"""Weight deltas, format BD1: what changed between two sets of weights of one layout, in as few bytes as the receiver's own weights allow. No torch.

`layout` names the tensors and cuts their elements into chunks, and says what a set of weights is to whoever encodes or applies; `files` has those of
safetensors files, and `states` says what chunks hash to. `container` knows the bytes of an object, `delta` makes objects and reads them, `applying`
brings weights from one state to the next, `merge` adds deltas up and turns them around, `measure` says what one consists of. `ordered` has chunks
worked on by several threads.

`numbers` knows element formats, and changes of them as whole numbers. Payloads of a chunk: `raw` and `planes` hold all new elements, `fast` and
`fast_zstd` how far it is to each changed one and by how much it moved (`streams`), `tight` the same in bits that are counted within elements of one
exponent; `choose` picks by the sizes that come of it. `kernels` says who computes: C (`native`), numba
(`jitted`, `loops`, `tight_loops`) or numpy (`plain`, `plain_tight`, `bits`), the same bytes.
"""
