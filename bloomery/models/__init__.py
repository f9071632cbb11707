"""One forward for training and sampling.

`config` reads a Hugging Face `config.json`; `load` builds a `Decoder` from safetensors (`weight_files`, `names`, `tensor_bytes`). The decoder calls
an `Attention` (packed for the trainer, cached for the sampler), sends rows to `experts` and adds the low-rank factors of `AdapterRows`; `products`
and `pointwise` are what its blocks compute with. `head` turns hidden states into log-probabilities; `numerics` knows under which pads a row's
result does not depend on its batch.
"""
