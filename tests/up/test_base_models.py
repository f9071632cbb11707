import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bloomery.types.errors import BloomeryError, InvalidInput, NotFound
from bloomery.up import base_models
from bloomery.up.base_models import CheckedModel, ModelArgument
from tests.live import BLOOMERY
from tests.up.builders import CONFIG, giant, model


def test_without_a_choice_the_shipped_model_is_served() -> None:
    assert [wanted.alias for wanted in base_models.model_arguments([])] == ["bloomery-tiny"]


def test_a_model_takes_the_place_of_the_shipped_one_unless_that_is_named_beside_it(tmp_path: Path) -> None:
    directory = model(tmp_path / "mine")
    assert [wanted.alias for wanted in base_models.model_arguments([f"other={directory}"])] == ["other"]
    assert [wanted.alias for wanted in base_models.model_arguments([f"other={directory}", "bloomery-tiny"])] == ["other", "bloomery-tiny"]


def test_a_directory_is_served_under_its_name_or_another(tmp_path: Path) -> None:
    directory = model(tmp_path / "mine")
    assert base_models.model_arguments([str(directory), f"org/other={directory}"]) == (
        ModelArgument("mine", directory),
        ModelArgument("org/other", directory),
    )


def test_an_unknown_model_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="unknown model `gpt-5`: give bloomery-tiny or a directory"):
        base_models.model_arguments(["gpt-5"])


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    one, two = model(tmp_path / "a" / "mine"), model(tmp_path / "b" / "mine")
    with pytest.raises(InvalidInput, match="two models are called `mine`"):
        base_models.model_arguments([str(one), str(two)])


def test_two_names_that_make_one_name_of_a_file_are_refused(tmp_path: Path) -> None:
    one, two = model(tmp_path / "a"), model(tmp_path / "b")
    with pytest.raises(InvalidInput, match="`org/mine` and `org-mine` are alike in names of files: name one of them"):
        base_models.model_arguments([f"org/mine={one}", f"org-mine={two}"])


def test_a_name_that_urls_and_files_would_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be a model's name"):
        base_models.model_arguments([f"../mine={model(tmp_path / 'mine')}"])


def remove_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def break_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


def keep_only_pickles(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def cut_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"short")


def trim_weights(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def break_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weights": []}')


def add_layers(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1 << 24}))


def describe_no_model(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))


def lose_a_norm(directory: Path) -> None:
    edit_weights(directory, lambda tensors: tensors.pop("model.layers.0.post_attention_layernorm.weight"))


def swap_widths(directory: Path) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    edit_weights(directory, lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name].T)}))


def edit_weights(directory: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def split_heads(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 16.5}))


def climb_out(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')


def change_family(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"}))


def forget_layers(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({key: value for key, value in CONFIG.items() if key != "num_hidden_layers"}))


def remove_config(directory: Path) -> None:
    (directory / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (remove_tokenizer, "has no tokenizer.json: save the tokenizer"),
        (break_tokenizer, "is not a tokenizer"),
        (keep_only_pickles, "only pickled weights, which are never loaded"),
        (cut_weights, "not a safetensors file"),
        (trim_weights, r"cut off: it has \d+ bytes of \d+; copy it again"),
        (break_index, "cannot be used"),
        (add_layers, r"model\.safetensors lacks `model\.layers\.1\.input_layernorm\.weight`; .*Copy the directory again"),
        (lose_a_norm, r"model\.safetensors lacks `model\.layers\.0\.post_attention_layernorm\.weight`\."),
        (swap_widths, r"`model\.layers\.0\.mlp\.gate_proj\.weight` in model\.safetensors has shape \[32, 48\], not \[48, 32\]"),
        (split_heads, "head_dim is 16.5: a whole number"),
        (describe_no_model, "num_hidden_layers is 1000000000"),
        (climb_out, "only files of the same directory"),
        (change_family, "model_type `gpt2` is not one of"),
        (forget_layers, "num_hidden_layers"),
        (remove_config, "has no config.json"),
    ],
)
def test_a_directory_that_cannot_be_served_says_why_before_anything_loads(tmp_path: Path, damage: object, complaint: str) -> None:
    directory = model(tmp_path / "mine")
    damage(directory)  # type: ignore[operator]
    with pytest.raises(BloomeryError, match=complaint) as refused:
        base_models.check(ModelArgument("mine", directory), "float32")
    assert refused.value.category == "user"


@pytest.mark.slow
def test_up_names_a_tensor_that_is_missing_and_starts_nothing(tmp_path: Path) -> None:
    directory = model(tmp_path / "mine")
    lose_a_norm(directory)
    argv = [BLOOMERY, "up", "--model", str(directory), "--data-dir", str(tmp_path / "data"), "--port", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "model.safetensors lacks `model.layers.0.post_attention_layernorm.weight`" in " ".join(done.stderr.split())
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("{}/absent", "unknown model `{}/absent`: give bloomery-tiny or a directory that save_pretrained wrote"),
        ("{}/file", "{}/file is a file: give bloomery-tiny or a directory that save_pretrained wrote"),
        ("mine={}/file", "{}/file is a file: give bloomery-tiny or a directory that save_pretrained wrote"),
        ("{}/empty", "{}/empty has no config.json: give a directory that save_pretrained wrote"),
        ("mine=", "a model without a directory: give bloomery-tiny or a directory that save_pretrained wrote"),
        ("", "a model without a directory: give bloomery-tiny or a directory that save_pretrained wrote"),
        ("~nobody-of-that-name/x", "~nobody-of-that-name/x is in the home of a user whom this machine does not know: give the whole path"),
    ],
)
def test_up_says_in_one_line_what_is_no_model_and_makes_nothing(tmp_path: Path, value: str, complaint: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    argv = [BLOOMERY, "up", "--model", value.format(tmp_path), "--data-dir", str(tmp_path / "data"), "--port", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {complaint.format(tmp_path)}\n")
    assert not (tmp_path / "data").exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    directory = model(tmp_path / "mine", words=65)
    with pytest.raises(InvalidInput, match=r"token id 64, but config\.json says vocab_size 64"):
        base_models.check(ModelArgument("mine", directory), "float32")


def test_what_a_model_needs_follows_its_parameters_and_dtype(tmp_path: Path) -> None:
    wanted = ModelArgument("mine", model(tmp_path / "mine"))
    full, half = base_models.check(wanted, "float32"), base_models.check(wanted, "bfloat16")
    assert full.parameters == half.parameters == 64 * 32 + 3 * 32 + 3 * 32 * 32 + 3 * 48 * 32
    assert full.needs_bytes - half.needs_bytes == pytest.approx(full.parameters * 2 * 2.25, abs=1)


def test_a_replica_needs_the_weights_once(tmp_path: Path) -> None:
    argument = ModelArgument("mine", model(tmp_path / "mine"))
    full, half = base_models.check(argument, "float32"), base_models.check(argument, "bfloat16")
    tied = 64 * 32 if CONFIG["tie_word_embeddings"] else 0
    assert full.replica_bytes - half.replica_bytes == pytest.approx((full.parameters * 1.25 + tied) * 2, abs=1)


def test_a_vocabulary_costs_every_process_and_no_dtype_makes_it_cheaper(tmp_path: Path) -> None:
    checked = [base_models.check(ModelArgument("giant", giant(tmp_path / "giant")), dtype) for dtype in ("float32", "bfloat16")]
    assert len({each.process_bytes for each in checked}) == 1
    assert checked[0].process_bytes - base_models.check(ModelArgument("small", model(tmp_path / "small")), "float32").process_bytes > 20 << 30


LARGE = CheckedModel("large", Path("large"), 4_000_000_000, 36_300_000_000, 20_300_000_000, 300_000_000)


def test_the_announcement_says_where_bfloat16_is_slow() -> None:
    slow, fast = frozenset({"sse2", "avx2"}), frozenset({"avx2", "avx512bw"})
    said = base_models.announce(LARGE, "bfloat16", 20_000_000_000, flags=slow)
    assert said.startswith("large: 4.0 G parameters, bf16, which this processor has no instructions for: float32 is many times faster, needs ")
    assert "processor" not in base_models.announce(LARGE, "bfloat16", 20_000_000_000, flags=fast)
    assert "processor" not in base_models.announce(LARGE, "float32", 20_000_000_000, flags=slow)


def test_the_announcement_says_what_is_needed_and_what_is_free() -> None:
    assert base_models.announce(LARGE, "float32", 20_000_000_000) == "large: 4.0 G parameters, fp32, needs 36.3 GB, 20.0 GB free"


@pytest.mark.parametrize(("free", "hint"), [(20_000_000_000, "use --dtype bfloat16"), (5_000_000_000, "free memory or use a smaller model")])
def test_what_does_not_fit_is_refused_with_what_would_help(free: int, hint: str) -> None:
    with pytest.raises(InvalidInput, match=hint):
        base_models.refuse_what_does_not_fit([LARGE], "float32", free)


def test_models_that_fit_alone_may_not_fit_together() -> None:
    base_models.refuse_what_does_not_fit([LARGE], "float32", 37_000_000_000)
    with pytest.raises(InvalidInput, match=r"needs 72\.6 GB, 37\.0 GB free"):
        base_models.refuse_what_does_not_fit([LARGE, LARGE], "float32", 37_000_000_000)
    base_models.refuse_what_does_not_fit([LARGE], "float32", 57_000_000_000, replicas=1)
    with pytest.raises(InvalidInput, match=r"needs 56\.6 GB, 50\.0 GB free: use --dtype bfloat16, fewer replicas or a smaller model"):
        base_models.refuse_what_does_not_fit([LARGE], "float32", 50_000_000_000, replicas=1)
    with pytest.raises(InvalidInput, match=r"50\.0 GB free: use fewer replicas or a smaller model"):
        base_models.refuse_what_does_not_fit([LARGE], "float32", 50_000_000_000, replicas=9)


def test_the_base_hash_is_of_content_and_not_of_place(tmp_path: Path) -> None:
    here, there = model(tmp_path / "here"), model(tmp_path / "there")
    (there / "README.md").write_text("a model card changes nothing")
    assert base_models.base_hash(here) == base_models.base_hash(there)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_the_base_hash_notices_every_file_that_changes_answers(tmp_path: Path, name: str) -> None:
    directory = model(tmp_path / "mine")
    before = base_models.base_hash(directory)
    with (directory / name).open("a") as file:
        file.write(" ")
    assert base_models.base_hash(directory) != before


def test_the_base_hash_notices_other_weights(tmp_path: Path) -> None:
    assert base_models.base_hash(model(tmp_path / "one", seed=1)) != base_models.base_hash(model(tmp_path / "two", seed=2))
