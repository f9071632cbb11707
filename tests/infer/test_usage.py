"""What the sampler says of itself while it works, for who watches it."""

from bloomery.infer.plan import Limits
from tests.infer.builders import prompt, request, sampler
from tests.train.builders import decoder


def test_the_cache_that_is_in_use_and_who_had_to_leave_it_are_told() -> None:
    model = decoder()
    roomy, crowded = sampler(model), sampler(model, limits=Limits(slots=4, token_budget=600, cache_tokens=1024, kept_tokens=0))
    assert (roomy.cache_usage, crowded.cache_usage) == (0.0, 0.0)
    # Beyond 512 tokens a sample takes a 17th block, and there are 32.
    for engine in (roomy, crowded):
        for number in range(2):
            engine.submit(request(f"r{number}", prompt(505, number), max_tokens=12))
    most = {roomy: 0.0, crowded: 0.0}
    for engine in most:
        while engine.busy:
            engine.step()
            most[engine] = max(most[engine], engine.cache_usage)
    assert 0 < most[roomy] < most[crowded] <= 1
    assert (roomy.preemptions, crowded.preemptions > 0) == (0, True)
    assert (roomy.cache_usage, crowded.cache_usage) == (0.0, 0.0)
