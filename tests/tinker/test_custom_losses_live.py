"""Custom losses through the unmodified SDK: computed by the client, and with `--custom-losses` by the server, with the same gradients."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
import torch.nn.functional as F
from tinker import types

from bloomery.services.training.active import Patience
from tests.live import LiveServer, running_server
from tests.sdk import connected

MODEL = "bloomery-tiny"
TEXTS = ("json.dumps turns an object into text.", "json.loads is its inverse.", "os.path.join joins paths.", "re.match begins at the start.")
ADAM = types.AdamParams(learning_rate=1e-3)
BETA = 0.1
GAP_S = Patience().gap_s
RANKS = {"logprobs": 1, "weights": 1}


@pytest.fixture(scope="module")
def computing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that computes custom losses."""
    with running_server(tmp_path_factory.mktemp("custom") / "data", "--custom-losses") as server:
        yield server


@pytest.fixture(scope="module")
def served(computing: LiveServer) -> Iterator[tinker.ServiceClient]:
    with connected(computing) as found:
        yield found


def new_run(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()


def examples(run: tinker.TrainingClient) -> list[types.Datum]:
    """With weights that are real and signed; the first token of each has none."""
    noise = np.random.default_rng(2)
    data = []
    for tokens in map(run.get_tokenizer().encode, TEXTS):
        weights = noise.normal(size=len(tokens) - 1)
        weights[0] = 0
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], "weights": list(weights)})
        )
    return data


def weighted(data: list[types.Datum], weights: list[np.ndarray]) -> list[types.Datum]:
    inputs = [{"target_tokens": one.loss_fn_inputs["target_tokens"], "weights": list(own)} for one, own in zip(data, weights, strict=True)]
    return [types.Datum(model_input=one.model_input, loss_fn_inputs=own) for one, own in zip(data, inputs, strict=True)]


def scored(run: tinker.TrainingClient, data: list[types.Datum]) -> list[np.ndarray]:
    return [output["logprobs"].to_numpy() for output in run.forward(data, "cross_entropy").result().loss_fn_outputs]


def stepped(run: tinker.TrainingClient, data: list[types.Datum]) -> tuple[float, np.ndarray]:
    """The norm of the gradients, and the log-probabilities after the step."""
    norm = run.optim_step(ADAM).result().metrics["grad_norm"]
    return norm, np.concatenate(scored(run, data))


def assert_same(ours: tuple[float, np.ndarray], theirs: tuple[float, np.ndarray], before: list[np.ndarray]) -> None:
    """The same gradients, hence the same weights: attention with and without the pads of exact losses is a few units of float32 apart."""
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    moved = np.abs(theirs[1] - np.concatenate(before)).max()
    assert np.abs(ours[1] - theirs[1]).max() < 0.01 * moved


# Computed by the client


def preference(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """As DPO, over pairs of data: chosen, rejected, chosen, ..."""
    margins = torch.stack([chosen.sum() - rejected.sum() for chosen, rejected in zip(logprobs[::2], logprobs[1::2], strict=True)])
    return -F.logsigmoid(BETA * margins).sum(), {"accuracy:mean": float((margins > 0).float().mean()), "pairs:sum": float(len(margins))}


def test_a_loss_over_pairs_has_the_gradients_of_the_equivalent_weights(client: tinker.ServiceClient) -> None:
    custom, built_in = new_run(client), new_run(client)
    data = examples(custom)
    before = scored(built_in, data)
    result = custom.forward_backward_custom(data, preference).result()
    margins = [chosen.sum() - rejected.sum() for chosen, rejected in zip(before[::2], before[1::2], strict=True)]
    slopes = [BETA / (1 + np.exp(BETA * margin)) for margin in margins]
    weights = [sign * slopes[index // 2] * np.ones_like(values) for index, (values, sign) in enumerate(zip(before, (1, -1, 1, -1), strict=True))]
    surrogate = built_in.forward_backward(weighted(data, weights), "cross_entropy").result()
    assert result.metrics["loss:sum"] == pytest.approx(sum(np.log1p(np.exp(-BETA * margin)) for margin in margins), rel=1e-5)
    assert result.metrics["surrogate_loss:sum"] == pytest.approx(surrogate.metrics["loss:sum"], rel=1e-5)
    assert (result.metrics["accuracy:mean"], result.metrics["pairs:sum"]) == (np.mean([margin > 0 for margin in margins]), 2.0)
    assert_same(stepped(custom, data), stepped(built_in, data), before)


def test_signed_weights_are_those_of_cross_entropy(client: tinker.ServiceClient) -> None:
    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
        return -sum((own * values).sum() for own, values in zip(weights, logprobs, strict=True)), {}

    custom, built_in = new_run(client), new_run(client)
    data = examples(custom)
    before = scored(built_in, data)
    ours = custom.forward_backward_custom(data, loss).result()
    theirs = built_in.forward_backward(data, "cross_entropy").result()
    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5)
    assert_same(stepped(custom, data), stepped(built_in, data), before)


def broken(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    raise ZeroDivisionError("my own mistake")


def broken_off(client: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run whose second operation never comes: the forward of a custom loss had the first place, its backward was to have the next."""
    run = new_run(client)
    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        run.forward_backward_custom(examples(run), broken).result()
    return run


def test_a_function_that_fails_poisons_its_client_and_nobody_else(client: tinker.ServiceClient) -> None:
    run, other = broken_off(client), new_run(client)
    with pytest.raises(RuntimeError, match="poisoned"):
        run.optim_step(ADAM).result()
    other.forward_backward(examples(other), "cross_entropy").result()
    assert other.optim_step(ADAM).result().metrics["optimizer_step"] == 1


def test_whoever_holds_the_run_may_take_the_place_of_the_backward_that_never_came(client: tinker.ServiceClient, live_server: LiveServer) -> None:
    run = broken_off(client)
    assert result_of(live_server, submitted_step(live_server, run, 2))["metrics"]["optimizer_step"] == 1


@pytest.mark.slow
def test_a_function_that_fails_leaves_a_gap_that_the_server_bridges(client: tinker.ServiceClient, live_server: LiveServer) -> None:
    run = broken_off(client)
    began_s = time.monotonic()
    spoiled, good = submitted_step(live_server, run, 3), submitted_step(live_server, run, 4)
    answer = result_of(live_server, spoiled)
    waited_s = time.monotonic() - began_s
    assert waited_s >= GAP_S
    # What never came might have been a backward, so the step behind it has no gradients to trust; the next one goes on.
    assert answer["category"] == "user"
    assert "an earlier operation failed" in answer["error"]
    given_up = result_of(live_server, spoiled.replace("|3|", "|2|"))
    assert given_up["category"] == "user"
    assert f"did not arrive within {GAP_S:g} s" in given_up["error"]
    assert result_of(live_server, good)["metrics"]["optimizer_step"] == 1


def submitted_step(server: LiveServer, run: tinker.TrainingClient, seq: int) -> str:
    """The future of a step under a number of the caller's choice, which a poisoned client does not send."""
    body = {"model_id": run.model_id, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}}
    answer = httpx.post(f"{server.url}/api/v1/optim_step", json=body, headers={"x-api-key": server.key})
    return str(answer.json()["request_id"])


def result_of(server: LiveServer, future: str) -> dict[str, Any]:
    """Asked for again and again, as the SDK does it."""
    for _ in range(6):
        body, headers = {"request_id": future}, {"x-api-key": server.key}
        answer = httpx.post(f"{server.url}/api/v1/retrieve_future", json=body, headers=headers, timeout=60)
        if answer.status_code != 408:
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found
    pytest.fail(f"`{future}` has no result after six polls")


@pytest.mark.contract("POST /api/v1/create_custom_loss", "session_id", refused="unless the server was started with `--custom-losses`")
def test_a_server_computes_no_custom_losses_unless_it_was_started_so(client: tinker.ServiceClient, live_server: LiveServer) -> None:
    handle = client.create_custom_loss(sequence_level, RANKS).result()
    assert handle.loss_id is None
    run = new_run(client)
    metrics = run.forward_backward_custom(examples(run), handle).result().metrics
    assert {"loss:sum", "surrogate_loss:sum", "custom/likely:mean", "custom/tokens:sum"} <= metrics.keys()
    headers = {"x-api-key": live_server.key}
    body = request_of([], client.holder.get_session_id())
    answer = httpx.post(f"{live_server.url}/api/v1/create_custom_loss", json=body, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "not_supported")


# Computed by the server


def sequence_level(logprobs: Any, weights: Any) -> Any:
    """Not linear in the log-probabilities, masked, and divided by a length."""
    mask = weights != 0
    mean = torch.where(mask, logprobs, 0.0).sum() / logprobs.shape[0]
    loss = -(mean.exp() * weights[1:].sum()) + F.softplus(-(logprobs * weights).sum(), beta=1.5)
    return loss, {"custom/likely:mean": mean.exp(), "custom/tokens:sum": mask.float().sum()}


@pytest.mark.contract("loss custom")
@pytest.mark.contract("POST /api/v1/forward_backward", "loss_fn_config_v2.*.text")
@pytest.mark.contract(
    "POST /api/v1/create_custom_loss",
    "session_id",
    "custom_loss_seq_id",
    "name",
    "inputs.name",
    "inputs.rank",
    "graph.nodes.op",
    "graph.nodes.name",
    "graph.nodes.target",
    "graph.nodes.args",
    "graph.nodes.kwargs",
)
def test_the_server_computes_what_the_client_would(served: tinker.ServiceClient) -> None:
    handle = served.create_custom_loss(sequence_level, RANKS).result()
    assert handle.loss_id is not None
    here, there = new_run(served), new_run(served)
    data = examples(here)
    before = scored(there, data)
    ours = here.forward_backward_custom(data, handle).result()
    theirs = there.forward_backward_custom(data, on_the_client(sequence_level)).result()
    assert ours.metrics == pytest.approx({name: theirs.metrics[name] for name in ours.metrics}, rel=1e-5)
    assert ours.metrics.keys() == {"loss:sum", "custom/likely:mean", "custom/tokens:sum"}
    assert [output["logprobs"].to_numpy().tolist() for output in ours.loss_fn_outputs] == [values.tolist() for values in before]
    assert_same(stepped(here, data), stepped(there, data), before)
    assert here.forward(data, "custom", {"loss_id": handle.loss_id}).result().metrics.keys() == ours.metrics.keys()


def test_chunks_add_up(served: tinker.ServiceClient) -> None:
    def likelihood(logprobs: Any) -> Any:
        return -logprobs.sum(), {"custom/shortest:mean": logprobs.min()}

    handle = served.create_custom_loss(likelihood, {"logprobs": 1}).result()
    run = new_run(served)
    data = examples(run)
    together = run.forward_backward_custom(data, handle).result().metrics
    alone = [run.forward_backward_custom([one], handle).result().metrics for one in data]
    assert together["loss:sum"] == pytest.approx(sum(metrics["loss:sum"] for metrics in alone))
    assert together["custom/shortest:mean"] == pytest.approx(np.mean([metrics["custom/shortest:mean"] for metrics in alone]))


def test_a_replay_needs_nothing_but_the_journal(served: tinker.ServiceClient, computing: LiveServer) -> None:
    def squared(logprobs: Any) -> Any:
        return (logprobs * logprobs).sum(), {}

    handle = served.create_custom_loss(squared, {"logprobs": 1}).result()
    undisturbed, disturbed = new_run(served), new_run(served)
    data = examples(undisturbed)
    undisturbed.forward_backward_custom(data, handle).result()
    disturbed.forward_backward_custom(data, handle).result()
    os.kill(computing.pid(f"engine-{MODEL}"), signal.SIGKILL)
    found, expected = stepped(disturbed, data), stepped(undisturbed, data)
    assert found[0] == expected[0]
    assert np.array_equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda logprobs: (F.gelu(logprobs).sum(), {}), "operator `gelu` is not one"),
        (lambda logprobs: (logprobs[logprobs > -1].sum(), {}), "for masks use `torch.where`"),
        (lambda logprobs: (logprobs.cuda().sum(), {}), "operator `cuda` is not one"),
        (lambda logprobs: (sum([logprobs.sum()] * 1100), {}), "at most 1017 items"),
    ],
)
def test_a_loss_that_is_not_taken_is_refused_when_it_is_created(served: tinker.ServiceClient, function: Callable[..., Any], says: str) -> None:
    with pytest.raises(tinker.BadRequestError, match=says):
        served.create_custom_loss(function, {"logprobs": 1}).result()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda logprobs, weights: (logprobs * 1.5, {}), r"data\[0\]: the loss of `<lambda>` has shape"),
        (lambda logprobs, weights: ((logprobs.exp() - 2).log().sum(), {}), r"data\[0\]: the loss of `<lambda>` is nan"),
        (lambda logprobs, weights: (logprobs[500], {}), r"data\[0\].*IndexError"),
        (lambda logprobs, weights: (weights.sum(), {}), "does not depend on `logprobs`"),
    ],
)
@pytest.mark.contract("POST /api/v1/create_custom_loss", "name")
def test_a_loss_that_fails_is_a_user_error_and_the_run_goes_on(served: tinker.ServiceClient, function: Callable[..., Any], says: str) -> None:
    run = new_run(served)
    data = examples(run)
    handle = served.create_custom_loss(function, RANKS).result()
    with pytest.raises(tinker.RequestFailedError, match=says):
        run.forward_backward_custom(data, handle).result()
    with pytest.raises(tinker.RequestFailedError, match="an earlier operation failed"):
        run.optim_step(ADAM).result()
    with pytest.raises(tinker.RequestFailedError, match="no custom loss `loss-of-nobody`"):
        run.forward(data, "custom", {"loss_id": "loss-of-nobody"}).result()
    run.forward_backward(data, "cross_entropy").result()
    assert run.optim_step(ADAM).result().metrics["optimizer_step"] == 1


@pytest.mark.contract("POST /api/v1/create_custom_loss", "custom_loss_seq_id", "inputs.rank", "graph.format")
def test_a_graph_is_refused_on_the_wire_too_and_a_lost_answer_is_asked_again(served: tinker.ServiceClient, computing: LiveServer) -> None:
    headers = {"x-api-key": computing.key}

    def posted(*calls: dict[str, Any], rank: int = 1) -> httpx.Response:
        body = request_of(list(calls), served.holder.get_session_id(), rank)
        return httpx.post(f"{computing.url}/api/v1/create_custom_loss", json=body, headers=headers)

    exp = {"op": "call_function", "name": "x", "target": "torch.exp", "args": [{"ref": "logprobs"}]}
    for answer, says in (
        (posted({**exp, "args": [{"ref": "x"}]}), "a loss has no cycles"),
        (posted({**exp, "args": [{"ref": "gone"}]}), "`gone`, which is no node"),
        (posted(exp, rank=3), "`logprobs` has rank 3"),
        (posted({**exp, "extra": 1}), "Extra inputs are not permitted"),
        (posted(*[{**exp, "name": f"x{index}"} for index in range(2000)]), "at most 1017 items"),
    ):
        assert (answer.status_code, answer.json()["category"]) == (400, "user")
        assert says in answer.json()["error"]
    assert posted(exp).json() == posted(exp).json()
    future = {"request_id": posted(exp).json()["request_id"]}
    assert httpx.post(f"{computing.url}/api/v1/retrieve_future", json=future, headers=headers).json()["loss_id"]


def on_the_client(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same loss as a function over all data."""

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        found = [function(values, one.loss_fn_inputs["weights"].to_torch()) for one, values in zip(data, logprobs, strict=True)]
        names = found[0][1]
        sums = {name: sum(metrics[name].item() for _, metrics in found) for name in names}
        means = {name: value / len(data) if name.endswith(":mean") else value for name, value in sums.items()}
        return sum(one for one, _ in found), means

    return loss


def request_of(calls: list[dict[str, Any]], session_id: str, rank: int = 1) -> dict[str, Any]:
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        *calls,
        {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]},
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}]},
    ]
    inputs = [{"name": "logprobs", "rank": rank}]
    return {"session_id": session_id, "custom_loss_seq_id": 1 << 40, "name": "wire", "inputs": inputs, "graph": {"format": 1, "nodes": nodes}}
