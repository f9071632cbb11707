"""One forward for training and sampling.

`config` reads a Hugging Face `config.json`; `load` builds a `Decoder` from safetensors; the decoder calls an `Attention` (packed for the trainer,
cached for the sampler) and adds the low-rank factors of `AdapterRows`; `head` turns hidden states into log-probabilities; `numerics` knows the
pads under which a row's result does not depend on its batch.
"""
