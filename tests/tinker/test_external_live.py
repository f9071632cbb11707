"""Exported weights, fetched as the SDK and the `tinker` command fetch them, and loaded in PEFT, give the trainer's log-probabilities."""

import json
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from click.testing import CliRunner
from peft import PeftModel
from tinker import types
from tinker.cli.__main__ import main_cli
from transformers import AutoModelForCausalLM

from tests.live import LiveServer, wait_until
from tests.tinker.tenants import MODEL, datum, new_key, post, rest_of, train

pytestmark = [
    # PEFT asks transformers for a property under its old name, and warns that the head of this model is its embedding too: merging would change both.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

TOKENS = [5, 17, 99, 250, 31, 7, 64, 12, 1000, 2000]


@pytest.fixture
def rest(live_server: LiveServer) -> tinker.RestClient:
    return rest_of(live_server, live_server.key)


@pytest.fixture(scope="module")
def trained(client: tinker.ServiceClient) -> tinker.TrainingClient:
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    train(run, TOKENS, 3)
    return run


def fetch(url: str) -> bytes:
    """As anybody would, without a header."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        content = answer.read()
        assert int(answer.headers["content-length"]) == len(content)
    return content


def status_of(url: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetch(url)
    refused.value.close()
    return refused.value.code


def peft_logprobs(directory: Path, base: str) -> np.ndarray:
    """Of the tokens, by the adapter in the directory on the base model."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(directory))
    with torch.no_grad():
        logprobs = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()


@pytest.mark.contract("POST /api/v1/save_weights_external", "path", "ttl_seconds")
@pytest.mark.contract("GET /api/v1/training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls")
@pytest.mark.contract("GET /api/v1/external_weights/{token}/{name}")
@pytest.mark.contract("HEAD /api/v1/external_weights/{token}/{name}")
def test_an_export_loads_in_peft_and_gives_the_trainers_logprobs(
    trained: tinker.TrainingClient, rest: tinker.RestClient, tmp_path: Path, live_server: LiveServer
) -> None:
    path = trained.save_weights_external("final", ttl_seconds=7200).result().path
    assert path == f"tinker://{trained.model_id}/external_weights/final"
    offer = rest.get_external_weights_urls(path).result()
    (listed,) = [each for each in rest.list_checkpoints(trained.model_id).result().checkpoints if each.tinker_path == path]
    assert timedelta(hours=1) < listed.expires_at - datetime.now(UTC) <= timedelta(hours=2)
    assert timedelta(minutes=30) < offer.expires - datetime.now(UTC) <= timedelta(hours=1)
    assert offer.urls.keys() == {"adapter_model.safetensors", "adapter_config.json"}
    for name, url in offer.urls.items():
        assert url.startswith(f"{live_server.url}/")
        (tmp_path / name).write_bytes(fetch(url))
        assert httpx.get(url).content == fetch(url)
        assert int(httpx.head(url).headers["content-length"]) == len(fetch(url))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (8, 32, MODEL)
    assert "lm_head" in config["target_modules"]
    expected = trained.forward([datum(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    base = trained.get_info().model_data.tokenizer_id
    # float32 on both sides: other kernels and another order of summation.
    np.testing.assert_allclose(peft_logprobs(tmp_path, base), expected, rtol=0, atol=1e-4)


def test_an_export_is_a_checkpoint_like_any_other(trained: tinker.TrainingClient, rest: tinker.RestClient, client: tinker.ServiceClient) -> None:
    path = trained.save_weights_external("listed").result().path
    (found,) = [each for each in rest.list_checkpoints(trained.model_id).result().checkpoints if each.tinker_path == path]
    assert (found.checkpoint_id, found.checkpoint_type, found.public) == ("external_weights/listed", "external", False)
    assert found.size_bytes > 1000
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 8
    with pytest.raises(tinker.RequestFailedError, match="`listed` already"):
        trained.save_weights_external("listed").result()
    with pytest.raises(tinker.BadRequestError, match="not for sampling"):
        client.create_sampling_client(model_path=path).result()
    with pytest.raises(tinker.BadRequestError, match="load a `weights` path"):
        client.create_training_client_from_state(path).result()
    with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients"):
        trained.save_weights_external("secret", age_encryption_recipients=["age1qqq"]).result()
    for nonsense in ("sampler_weights", "weights"):
        with pytest.raises(ValueError, match="only accepts external weights"):
            rest.get_external_weights_urls(path.replace("external_weights", nonsense)).result()


def test_addresses_work_for_whom_they_were_made_and_no_longer_than_the_export(
    trained: tinker.TrainingClient, rest: tinker.RestClient, live_server: LiveServer
) -> None:
    gone, brief = (trained.save_weights_external(name).result().path for name in ("gone", "brief"))
    stranger = rest_of(live_server, new_key(live_server, "outside", "onlooker"))
    with pytest.raises(tinker.NotFoundError):
        stranger.get_external_weights_urls(gone).result()
    url = rest.get_external_weights_urls(gone).result().urls["adapter_config.json"]
    assert fetch(url)
    assert status_of(url.replace("adapter_config", "../api_key")) == 404
    token = url.split("/")[-2]
    header, claims, signature = token.split(".")
    for forged in (f"{header}.{claims}.{signature[::-1]}", f"{header}.{claims[:-2]}AA.{signature}", "x", f"{header}.{claims}."):
        assert status_of(url.replace(token, forged)) == 401
    # It opens files and nothing else.
    assert post(live_server, "/auth/token", {}, key=token).status_code == 401
    login = post(live_server, "/auth/token", {}).json()["jwt"]
    assert status_of(url.replace(token, login)) == 401
    rest.delete_checkpoint_from_tinker_path(gone).result()
    assert status_of(url) == 404
    url = rest.get_external_weights_urls(brief).result().urls["adapter_config.json"]
    rest.set_checkpoint_ttl_from_tinker_path(brief, 1).result()

    def over() -> bool:
        try:
            fetch(url)
        except urllib.error.HTTPError as refused:
            refused.close()
            return True
        return False

    wait_until(over)


def test_the_tinker_command_downloads_a_training_checkpoint(
    trained: tinker.TrainingClient, rest: tinker.RestClient, live_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", live_server.url)
    monkeypatch.setenv("TINKER_API_KEY", live_server.key)
    path = trained.save_state("by-command").result().path
    done = CliRunner().invoke(main_cli, ["checkpoint", "download", path, "--output", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (directory,) = tmp_path.iterdir()
    expected = trained.forward([datum(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    base = trained.get_info().model_data.tokenizer_id
    np.testing.assert_allclose(peft_logprobs(directory, base), expected, rtol=0, atol=1e-4)
    # The command removes its temporary export.
    assert "external_weights/download" not in {each.checkpoint_id for each in rest.list_user_checkpoints().result().checkpoints}


def test_repeated_retrieval_says_the_same(live_server: LiveServer, client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    future = post(live_server, "/save_weights_external", {"model_id": run.model_id, "seq_id": 1, "path": "twice"}).json()["request_id"]
    answers = [post(live_server, "/retrieve_future", {"request_id": future}).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0]["path"] == f"tinker://{run.model_id}/external_weights/twice"
    assert types.ParsedCheckpointTinkerPath.from_tinker_path(answers[0]["path"]).checkpoint_type == "external"
