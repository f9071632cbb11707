"""`bloomery export` against a live server: what the SDK trained, `peft` and `transformers` score as the SDK's `forward` does."""

import gc
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

from bloomery.client import Client
from bloomery.models import tiny
from bloomery.types.errors import Forbidden, InvalidInput, NotFound, NotSupported
from tests.live import BLOOMERY, LiveServer
from tests.sdk import LEAVES_CONNECTIONS, connected

pytestmark = [
    LEAVES_CONNECTIONS,
    # PEFT asks transformers for a property under its old name, and does not want merged what shares the head with the embedding.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

MODEL = "bloomery-tiny"
TEXTS = ("json.dumps turns an object into text.", "Its inverse is json.loads, which reads what was written.")
# float32 on both sides, four layers: other kernels, other orders of summation, and (W + sBA)x against Wx + sBAx.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with connected(live_server) as found:
        yield found
    gc.collect()


@pytest.fixture(scope="module")
def data() -> list[types.Datum]:
    tokenizer = AutoTokenizer.from_pretrained(tiny.PATH)
    encoded = [tokenizer.encode(text) for text in TEXTS]
    weights = [[1.0] * (len(tokens) - 1) for tokens in encoded]
    return [
        types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], "weights": weight})
        for tokens, weight in zip(encoded, weights, strict=True)
    ]


class Trained:
    """A run that learned something, and where its weights were published."""

    def __init__(self, client: tinker.ServiceClient, data: list[types.Datum], name: str, **lora: object) -> None:
        self.run = client.create_lora_training_client(base_model=MODEL, seed=1, **lora).result()
        rate = 5e-3 if lora.get("rank") else 5e-4
        losses = []
        for _ in range(6):
            losses.append(self.run.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            self.run.optim_step(types.AdamParams(learning_rate=rate)).result()
        assert losses[-1] < 0.8 * losses[0]
        self.path = self.run.save_weights_for_sampler(name).result().path
        self.data = data

    def forward(self) -> list[np.ndarray]:
        """The trainer's log-probabilities, through the SDK."""
        outputs = self.run.forward(self.data, "cross_entropy").result().loss_fn_outputs
        return [output["logprobs"].to_numpy() for output in outputs]

    def sampled(self, client: tinker.ServiceClient) -> list[np.ndarray]:
        """The sampler's log-probabilities of the same tokens, from the published weights."""
        sampler = client.create_sampling_client(model_path=self.path).result()
        texts = [[*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].data[-1])] for datum in self.data]
        return [np.array(sampler.compute_logprobs(types.ModelInput.from_ints(text)).result()[1:], np.float32) for text in texts]


@pytest.fixture(scope="module")
def adapter(client: tinker.ServiceClient, data: list[types.Datum]) -> Trained:
    return Trained(client, data, "adapter", rank=8)


@pytest.fixture(scope="module")
def whole(client: tinker.ServiceClient, data: list[types.Datum]) -> Trained:
    return Trained(client, data, "whole", rank=0)


def export(server: LiveServer, path: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [BLOOMERY, "export", path, "--out", str(out), "--data-dir", str(server.data_dir), *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300)


def scored(model: torch.nn.Module, data: list[types.Datum]) -> list[np.ndarray]:
    found = []
    with torch.no_grad():
        for datum in data:
            logits = model(torch.tensor(datum.model_input.to_ints())[None]).logits[0]
            targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].data, dtype=torch.long)
            found.append(logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy())
    return found


def assert_alike(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_an_adapter_loads_in_peft_and_scores_as_the_trainer(live_server: LiveServer, adapter: Trained, tmp_path: Path) -> None:
    done = export(live_server, adapter.path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "2 files and a model card" in done.stdout
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert "\nbase_model: bloomery-tiny\n" in (tmp_path / "out" / "README.md").read_text()
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == (str(tiny.PATH), 8, 32.0)
    assert f"AutoPeftModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r}, dtype=torch.float32)" in done.stdout
    base = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32)
    untrained = scored(base, adapter.data)
    model = PeftModel.from_pretrained(base, tmp_path / "out")
    assert_alike(adapter.forward(), scored(model, adapter.data))
    assert np.abs(adapter.forward()[0] - untrained[0]).max() > 0.1


def test_merged_into_its_base_it_loads_in_transformers_and_scores_as_the_trainer(live_server: LiveServer, adapter: Trained, tmp_path: Path) -> None:
    done = export(live_server, adapter.path, tmp_path / "out", "--merged", "--shard-gb", "0.005")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_alike(adapter.forward(), scored(model, adapter.data))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode(TEXTS[0])[:-1] == adapter.data[0].model_input.to_ints()


@pytest.mark.slow
def test_a_run_of_all_parameters_is_sampled_with_the_trainers_bits_and_exported_as_a_model(
    live_server: LiveServer, client: tinker.ServiceClient, whole: Trained, tmp_path: Path
) -> None:
    assert whole.run.get_info().is_lora is False
    forward = whole.forward()
    status = httpx.get(f"{live_server.url}/api/v1/status", headers={"x-api-key": live_server.key}).json()
    for ours, theirs in zip(forward, whole.sampled(client), strict=True):
        assert np.array_equal(ours, theirs) or not status["engines"][0]["detail"]["bit_exact"]
    done = export(live_server, whole.path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_alike(forward, scored(model, whole.data))


def test_a_model_that_was_trained_whole_is_deployed_and_chats(live_server: LiveServer, whole: Trained) -> None:
    with Client(live_server.url, live_server.key) as client:
        version = client.versions.files(whole.path)
        assert (version.kind, version.form, version.base_model) == ("full", "merged", MODEL)
        client.deployments.create("whole", version.version)
        assert client.versions.files("whole") == version
        answer = client.chat("whole", [{"role": "user", "content": "json"}], max_tokens=4)
        assert answer["system_fingerprint"] == version.version


def test_a_checkpoint_of_a_whole_model_begins_another_run(client: tinker.ServiceClient, whole: Trained) -> None:
    saved = whole.run.save_state("state").result().path
    again = client.create_training_client_from_state_with_optimizer(saved).result()
    assert again.get_info().is_lora is False
    outputs = again.forward(whole.data, "cross_entropy").result().loss_fn_outputs
    for ours, theirs in zip(whole.forward(), outputs, strict=True):
        assert np.array_equal(ours, theirs["logprobs"].to_numpy())


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused_by_name(live_server: LiveServer, whole: Trained, tmp_path: Path) -> None:
    with Client(live_server.url, live_server.key) as client:
        with pytest.raises(NotSupported, match="is a whole model, not an adapter: ask for form merged"):
            client.versions.files(whole.path, form="adapter")
        with pytest.raises(InvalidInput, match="is the base model itself: its files are those that the server was started with"):
            client.versions.files(MODEL)
        with pytest.raises(NotFound, match="never saved"):
            client.versions.files("tinker://nobody/sampler_weights/x")
        with pytest.raises(NotFound, match=r"has no file `x`.*it has config.json"):
            client.versions.download(whole.path, "x", tmp_path / "x")
        assert not (tmp_path / "x").exists()
        with pytest.raises(InvalidInput, match="form"):
            client.versions.files(whole.path, form="gguf")
    (tmp_path / "there").mkdir()
    done = export(live_server, whole.path, tmp_path / "there")
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path / 'there'} is there already: choose another directory\n")
    done = export(live_server, "tinker://nobody/sampler_weights/x", tmp_path / "out")
    assert done.returncode == 2
    assert "never saved" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.slow
def test_a_damaged_blob_ends_the_export_and_leaves_no_directory(live_server: LiveServer, client: tinker.ServiceClient, data, tmp_path: Path) -> None:
    trained = Trained(client, data, "damaged", rank=4)
    with Client(live_server.url, live_server.key) as own:
        key = own.versions.files(trained.path)
        blobs = live_server.data_dir / "blobs"
        manifest = json.loads((blobs / "manifests" / key.version).read_text())
        blob = bytearray((blobs / manifest["key"]).read_bytes())
        blob[-1] ^= 1
        (blobs / manifest["key"]).write_bytes(blob)
    for options in ((), ("--merged",)):
        done = export(live_server, trained.path, tmp_path / "out", *options)
        assert done.returncode == 2
        assert "broke off" in done.stderr
        assert not list(tmp_path.iterdir())


def test_another_project_exports_nothing(live_server: LiveServer, adapter: Trained) -> None:
    with Client(live_server.url, live_server.key) as client:
        stranger = client.keys.create("stranger", {"read", "train"}, project="other").key
        infers = client.keys.create("infers", {"infer"}).key
        version = client.versions.files(adapter.path).version
    for name in (adapter.path, version):
        with Client(live_server.url, stranger) as other, pytest.raises(NotFound):
            other.versions.files(name)
    with Client(live_server.url, infers) as other, pytest.raises(Forbidden, match="scope"):
        other.versions.files(version)


@pytest.mark.slow
def test_a_whole_model_without_a_name_is_exported_as_it_was_trained_though_it_lies_in_a_chain_alone(
    live_server: LiveServer, client: tinker.ServiceClient, whole: Trained, tmp_path: Path
) -> None:
    again = client.create_training_client_from_state_with_optimizer(whole.run.save_state("to-export").result().path).result()
    again.forward_backward(whole.data, "cross_entropy").result()
    again.optim_step(types.AdamParams(learning_rate=5e-4)).result()
    outputs = again.forward(whole.data, "cross_entropy").result().loss_fn_outputs
    with Client(live_server.url, live_server.key) as ours:
        saved = ours.run(again.model_id).save_snapshot().result()
        assert saved.travelled is not None
        assert not (live_server.data_dir / "blobs" / saved.key).exists()
        for file in ours.versions.files(saved.version).files:
            ours.versions.download(saved.version, file.name, tmp_path / file.name)
    assert_alike([output["logprobs"].to_numpy() for output in outputs], scored(AutoModelForCausalLM.from_pretrained(tmp_path), whole.data))
