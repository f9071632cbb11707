"""How many rows are computed at once."""

import pytest

from bloomery.types.batching import MAX_ROWS, MIN_ROWS, micro_batch_tokens, rows_at_once


@pytest.mark.parametrize(("width", "rows"), [(64, MAX_ROWS), (256, 1024), (400, 655), (512, MIN_ROWS), (8192, MIN_ROWS)])
def test_narrow_models_compute_more_rows_at_once(width, rows):
    assert rows_at_once(width) == rows == micro_batch_tokens(width, rank=8)


def test_all_parameters_have_the_largest_micro_batches():
    assert micro_batch_tokens(8192, rank=0) == MAX_ROWS
