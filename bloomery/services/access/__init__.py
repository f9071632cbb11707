"""Who calls, and what a key allows: `auth` turns keys into a `principal`, `identity` signed `tokens` that stand for keys.

`limits` says what a key may still use, and `repeats` knows what was answered to whom, so that nothing is done twice.
"""
