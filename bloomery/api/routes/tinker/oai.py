"""The OpenAI contract where the tinker contract has it, under `/oai/api/v1`: the same handlers as under `/v1`.

`model` is any name that is served there, a base model or a `tinker://` path of sampler weights among them.
"""

from bloomery.api.routes.openai import compose

PREFIX = "/oai/api/v1"

router = compose(PREFIX, "tinker")
