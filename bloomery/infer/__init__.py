"""Sampling with continuous batching: `plan` decides, `runner` computes, and `stepper` writes down what came of it.

`plan.plan_step` is pure: given who waits, who runs and what was kept, it says what happens in the next step. `cache` keeps the keys and values of all
running sequences in blocks, `states` those of layers that have a state, and both those of some that have left. `runner` drives the same
decoder as the trainer, with attention that reads that cache. `sampling` turns logits into tokens with noise that depends on a sample's seed and
position alone; `grammar` says which may come where an answer has a form; `inquiry` and `scoring` turn logits into everything that is asked about a
prompt. `drafts` finds what was guessed right of a sample, `retrace` guesses on where that was wrong, and `drawn` tells of tokens that were chosen.
`Sampler` owns them all: requests wait for their weights in `arrivals`, which `versions` keeps in memory, and then for a place in `queues`. `engine`
is the protocol of whatever samples, and `embedded` the `Sampler` behind it, on a thread of its own (`sampler_thread`): new weights are made in
`staging`, answer the `probe` before anybody is served with them, and follow one another as the `revisions` of a name; `scrub` looks whether those in
memory are still what they were. `recorded` has decode steps computed as programs, or `captured` as graphs of a GPU.
"""
