"""The shipped model: what the small random ones promise holds for it too."""

import pytest
import torch

from bloomery.models.load import load_decoder
from bloomery.models.tiny import PATH
from tests.infer.builders import adapter, generate, naive, prompt, request, sampler


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shipped_model_samples_and_scores_as_a_whole_forward_does(dtype):
    decoder = load_decoder(PATH, dtype=dtype)
    adapters = {"v0": adapter(decoder, 0)}
    requests = [
        request(f"{version}-{length}", prompt(length), version=version, seed=length, max_tokens=5)
        for version in ("base", "v0")
        for length in (3, 77, 333, 513)
    ]
    together = generate(sampler(decoder, adapters), *requests)
    for each in requests:
        tokens, logprobs = naive(decoder, each.prompt.numpy().tolist(), each.params, adapters.get(each.weights.version))
        assert together[each.request_id].tokens == {0: tokens}
        assert together[each.request_id].logprobs == {0: logprobs}
