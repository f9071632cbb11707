"""A request that another process began goes on with the bits that this one would have gone on with."""

import pytest
from msgspec.structs import replace

from bloomery.infer.plan import Limits
from bloomery.types.checks import check_generate
from bloomery.types.errors import InvalidInput
from bloomery.types.generation import SampledToken
from tests.infer.builders import adapter, drain, generate, prompt, request, sampler
from tests.train.builders import decoder

CUTS = (0, 1, 7, 19)
TOKENS = 20


@pytest.fixture(scope="module")
def model():
    return decoder()


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 5, "temperature": 1.3}, {"repetition_penalty": 1.3, "presence_penalty": 0.5}])
def test_what_is_left_of_an_answer_is_the_same_wherever_it_was_cut(model, params):
    adapters = {"v1": adapter(model, 1)}
    whole = request("whole", prompt(70), version="v1", seed=4, max_tokens=TOKENS, num_samples=len(CUTS), **params)
    undisturbed = generate(sampler(model, adapters), whole)["whole"]
    begun = tuple(tuple(undisturbed.tokens[index][:cut]) for index, cut in enumerate(CUTS))
    others = [request(f"other{n}", prompt(30 + n), seed=n, max_tokens=9) for n in range(3)]
    engine = sampler(model, adapters, Limits(slots=4, token_budget=64))
    for each in (*others, replace(whole, begun=begun)):
        engine.submit(each)
    told = [event for event in drain(engine) if event.request_id == "whole" and isinstance(event, SampledToken)]
    for index, cut in enumerate(CUTS):
        mine = [(event.position, event.token, event.logprob) for event in told if event.sample == index]
        expected = zip(range(TOKENS), undisturbed.tokens[index], undisturbed.logprobs[index], strict=True)
        assert mine == list(expected)[cut:]


@pytest.mark.parametrize(("begun", "changes"), [(((1,),), {}), (((1,), (1,) * 3), {}), (((10**6,), ()), {}), (((1,), ()), {"prompt_logprobs": True})])
def test_a_beginning_that_fits_nothing_is_refused(model, begun, changes):
    asked = replace(request("r", prompt(5), max_tokens=3, num_samples=2), begun=begun, **changes)
    with pytest.raises(InvalidInput) as refused:
        check_generate(asked, model.config)
    assert refused.value.field == "begun"


def test_a_beginning_without_tokens_is_none(model):
    check_generate(replace(request("r", prompt(5), max_tokens=1), begun=((),)), model.config)
