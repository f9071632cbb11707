"""Steps that a GPU computes as one graph have the bits of those whose kernels are launched one by one."""

import pytest
import torch

from bloomery.infer.sampler import Sampler
from bloomery.models.decoder import Decoder
from bloomery.models.kernel_probe import probe
from tests.infer.builders import Adapters, adapter, generate, prompt, request
from tests.train.builders import decoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


class CallByCall(Decoder):
    """Of another class, nothing is recorded."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tenants_that_come_and_go_get_the_bits_of_single_calls(dtype: torch.dtype) -> None:
    models = [decoder(dtype=dtype).to("cuda") for _ in range(2)]
    models[1].__class__ = CallByCall
    form = probe(models[0]).form
    assert form.row_pad == 1
    versions = ("base", "v0", "v1", "v2", "v0")
    requests = [request(f"r{n}", prompt(5 + 37 * n), version=versions[n % 5], seed=n, max_tokens=9 + 6 * n) for n in range(8)]
    found, replayed = [], []
    for model in models:
        engine = Sampler(model, Adapters(model, {f"v{seed}": adapter(model, seed) for seed in range(3)}), form=form)
        answers = generate(engine, *requests)
        found.append({name: answer.told for name, answer in answers.items()})
        replayed.append(engine._runner._recorded.replayed)
    assert found[0] == found[1]
    assert replayed[0] > 10
    assert replayed[1] == 0
