"""One forward for training and sampling.

`families` reads a Hugging Face `config.json` into the `config` of a decoder; `load` builds a `Decoder` from safetensors (`weight_files`, `names`,
`tensor_bytes`). Its layers (`block`) call an `Attention` (packed for the trainer, cached for the sampler; it gives layers with a state their chunks,
`recurrent`), send rows to `experts` and add the low-rank factors of `AdapterRows`; `products` and `pointwise` are what they compute with.
`head` turns hidden states into log-probabilities; `numerics` knows under which pads a row's result does not depend on its batch.
"""
