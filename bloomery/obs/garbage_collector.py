"""Python's collector of cycles, and those who wait meanwhile."""

import gc


def spare_what_stays() -> None:
    """Have it never look again at what is there now, once a process is up and keeps that to its end.

    A full collection looks at everything, with the interpreter's lock in hand: 90 ms for the 190,000 objects of an engine that serves nobody yet, in
    which no stream gets a token.
    """
    gc.collect()
    gc.freeze()
