"""Sampling with continuous batching: `plan` decides, `runner` computes, `sampler` commits.

`plan.plan_step` is pure: given who waits and who runs, it says what happens in the next step. `cache` keeps the keys and values of all running
sequences in compact slots. `runner` drives the same decoder as the trainer, with attention that reads that cache. `sampling` turns logits into
tokens with noise that depends on a sample's seed and position alone. `Sampler` owns them all and knows requests, adapters and events.
"""
