"""The processes that compute, as the api sees them: a `link` to each, and the `fleet` of engines and replicas, of which one answers.

A link is spoken to over a `connection`, with a `stream` for each request, as long as its `pulse` is felt. `models` knows their base models, and
`texts` what tokens of these say.
"""
