"""Samples: `rendering` makes tokens of messages, `sampling` streams what comes of them, and `stopping` finds stop strings in it.

`embedding` makes a vector of a text instead. `tool_use` reads what tools are called; `meters` measures what is served and bounds what waits.
"""
