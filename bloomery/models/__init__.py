"""One forward for training and sampling.

`families` reads a Hugging Face `config.json` into the `config` of a decoder; `load` builds a `Decoder` from safetensors (`weight_files`, `names`,
`tensor_bytes`). The decoder calls an `Attention` (packed for the trainer, cached for the sampler; it gives layers with a state their chunks,
`recurrent`), sends rows to `experts` and adds the low-rank factors of `AdapterRows`; `products` and `pointwise` are what its blocks compute with.
`head` turns hidden states into log-probabilities; `numerics` knows under which pads a row's result does not depend on its batch.
"""
