"""Chosen tokens at chosen places of a prompt: what the SDK sends is what is asked, and the answer has the shape and layout of the question."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.lib.public_interfaces.sampling_client import _tensor_data_to_model
from tinker.proto.response_conv import deserialize_sample_response

from bloomery.api.routes.tinker import bodies
from bloomery.api.routes.tinker.messages import PromptOut, encode_sample
from bloomery.api.routes.tinker.targets import Targets
from bloomery.types.arrays import Array
from bloomery.types.errors import InvalidInput
from bloomery.types.generation import PromptScored

NONE = -1


def sent(tensor: types.TensorData) -> bodies.Tensor:
    """As it arrives: the SDK's JSON, read by our door."""
    return bodies.Tensor.model_validate_json(_tensor_data_to_model(tensor).model_dump_json(exclude_none=True))


def answered(targets: Targets, logprobs: np.ndarray) -> types.TensorData:
    """As the SDK reads it."""
    scored = PromptScored(request_id="r", logprobs=Array.of(np.zeros(1, np.float32)), target_logprobs=Array.of(logprobs.astype(np.float32)))
    read = deserialize_sample_response(encode_sample([], PromptOut(scored, cells=targets.cells))).target_prompt_logprobs
    assert read is not None
    return read


@settings(max_examples=80, deadline=None)
@given(rows=st.integers(1, 12), columns=st.integers(1, 9), named=st.floats(0, 1), sparse=st.booleans(), seed=st.integers(0, 99))
def test_every_cell_is_asked_at_its_place_and_answered_there(rows: int, columns: int, named: float, sparse: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    ids = np.where(random.random((rows, columns)) < named, random.integers(0, 300, (rows, columns)), NONE)
    ids[random.integers(rows), random.integers(columns)] = 7
    tensor = torch.from_numpy(ids)
    question = types.TensorData.from_torch_sparse(tensor, pad_value=NONE) if sparse else types.TensorData.from_torch(tensor)
    targets = Targets.of(sent(question), rows + 1)
    positions, asked = targets.asked.positions.numpy(), targets.asked.ids.numpy()
    assert [(position - 1, token) for position, token in zip(positions, asked, strict=True)] == [
        (row, ids[row, column]) for row in range(rows) for column in range(columns) if ids[row, column] != NONE
    ]
    answer = answered(targets, -1000.0 * positions - asked)
    assert (answer.dtype, answer.shape) == ("float32", [rows, columns])
    assert answer.sparse_crow_indices == question.sparse_crow_indices
    assert answer.sparse_col_indices == question.sparse_col_indices
    expected = np.where(ids == NONE, 0.0, -1000.0 * (np.arange(rows)[:, None] + 1) - ids)
    assert np.array_equal(answer.to_torch().numpy(), expected)


def test_a_sparse_cell_of_none_is_listed_and_gets_zero() -> None:
    listed = {"data": [NONE, 5], "shape": [2, 3], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [2, 0]}
    targets = Targets.of(bodies.Tensor(dtype="int64", **listed), 3)
    assert (targets.asked.positions.numpy().tolist(), targets.asked.ids.numpy().tolist()) == ([2], [5])
    answer = answered(targets, np.array([-0.5]))
    assert (list(answer.data), answer.sparse_crow_indices, answer.sparse_col_indices) == ([0.0, -0.5], [0, 1, 2], [2, 0])


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ({"data": [1, 2], "shape": [2]}, r"must be int64\[2, K\]"),
        ({"data": [1, 2]}, r"must be int64\[2, K\]"),
        ({"data": [1], "shape": [1, 1]}, r"must be int64\[2, K\]"),
        ({"data": [], "shape": [2, 0]}, r"must be int64\[2, K\]"),
        ({"data": [1.0, 2.0], "shape": [2, 1], "dtype": "float32"}, r"must be int64\[2, K\]"),
        ({"data": [1], "shape": [2, 1]}, "has 1 values"),
        ({"data": [NONE, NONE], "shape": [2, 1]}, "every cell is -1"),
        ({"data": [NONE - 1, 1], "shape": [2, 1]}, "neither a token id nor -1"),
        ({"data": [0.5, 1.0], "shape": [2, 1]}, "neither a token id nor -1"),
        ({"data": [1 << 40, 1], "shape": [2, 1]}, "neither a token id nor -1"),
        ({"data": [1], "shape": [2, 1], "sparse_crow_indices": [0, 1, 1]}, "a sparse tensor has both"),
        ({"data": [1], "shape": [2, 1], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]}, "row pointers"),
        ({"data": [1], "shape": [2, 1], "sparse_crow_indices": [0, 1, 1], "sparse_col_indices": [1]}, "column between 0 and 0"),
    ],
)
def test_a_tensor_that_names_nothing_sensible_is_refused(tensor: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as refused:
        Targets.of(bodies.Tensor(**{"dtype": "int64"} | tensor), 3)
    assert refused.value.field == "target_prompt_logprobs"
