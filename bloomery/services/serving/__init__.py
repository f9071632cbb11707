"""Samples: `rendering` makes tokens of messages, `sampling` streams what comes of them, and `stopping` finds stop strings in it.

`tool_use` reads what tools are called; `meters` measures what is served and bounds what waits.
"""
