"""Batches: `batches` makes, shows and cancels them, `runner` has them answered, a few at a time.

`requests` reads their files, `answers` keeps what was answered and makes files of it, `batch_rows` are their rows as values. Who answers a request is
the application itself, which the api gives to the runner.
"""
