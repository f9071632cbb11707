"""Shifting of the SFT recipe; the loop itself runs against the live server in tests/test_loop.py, and taken up again in tests/jobs."""

from bloomery.recipes.sft import datum, mean_weighted


def test_position_i_predicts_token_i_plus_1() -> None:
    shifted = datum([5, 6, 7], [0.0, 0.0, 1.0])
    assert shifted.tokens.numpy().tolist() == [5, 6]
    assert shifted.inputs["target_tokens"].numpy().tolist() == [6, 7]
    assert shifted.inputs["weights"].numpy().tolist() == [0.0, 1.0]


def test_a_batch_is_a_mean_over_its_trained_tokens() -> None:
    batch = mean_weighted([datum([1, 2, 3], [0.0, 1.0, 1.0]), datum([4, 5], [0.0, 2.0])])
    assert [row.inputs["weights"].numpy().tolist() for row in batch] == [[0.25, 0.25], [0.5]]
