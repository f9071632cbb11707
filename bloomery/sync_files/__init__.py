"""The composition root of `bloomery sync`: weight deltas between safetensors files, for trainers that are not ours.

`actions` are the commands: files in, files out; `report` is what `inspect` tells; `foreign` does both for deltas of another program. `atomic` makes
what they write appear whole or not at all.
"""
