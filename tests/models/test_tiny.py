"""The base model that ships: its files, its tokenizer, and the text it is made from."""

import json
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from random import Random

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from bloomery.models.families import read_config
from bloomery.models.tiny import PATH
from bloomery.models.tiny.corpus import Document, documents_under
from bloomery.models.tiny.mixture import MAX_TOKENS, Mixture, Shelf, held_back, routable_packages
from bloomery.models.tiny.pretrain import CONFIG, new_decoder, schedule
from bloomery.models.tiny.tasks import GENERATORS, Chat, describe, route
from bloomery.models.tiny.tokenizer import CONTEXT, SPECIAL_TOKENS, VOCAB_SIZE, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PATH / "tokenizer.json"))


def test_the_package_ships_a_complete_directory_of_at_most_20_mb() -> None:
    files = {file.name: file.stat().st_size for file in PATH.iterdir()}
    assert files.keys() == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert sum(files.values()) <= 20 * 10**6


def test_weights_are_bf16_tied_and_between_4_and_10_million() -> None:
    with safe_open(PATH / "model.safetensors", framework="np") as file:
        slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 (a safetensors file is not a mapping)
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert {part.get_dtype() for part in slices} == {"BF16"}
    assert 4 * 10**6 <= sum(prod(part.get_shape()) for part in slices) <= 10 * 10**6
    assert read_config(PATH).tied_head


def test_transformers_reads_the_same_config_as_the_decoder_core() -> None:
    theirs, ours = AutoConfig.from_pretrained(PATH), read_config(PATH)
    assert theirs.model_type == "qwen3"
    assert (theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers) == (ours.vocab_size, ours.hidden_size, ours.num_layers)
    assert theirs.rope_parameters["rope_theta"] == ours.rope.theta
    assert theirs.max_position_embeddings == ours.context == CONTEXT


def test_generation_ends_at_both_end_tokens(tokenizer: Tokenizer) -> None:
    ends = json.loads((PATH / "generation_config.json").read_text())["eos_token_id"]
    assert [tokenizer.id_to_token(end) for end in ends] == ["<|im_end|>", "<|endoftext|>"]


def test_markers_and_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(f"a{token}b").tokens[1] == token
    assert tokenizer.encode("20481").tokens == list("20481")


@pytest.mark.parametrize("text", ["def f(x: int) -> str:\n    return 'é'", "  two  spaces\t\r\n", "日本語 🎉", "\x00\x7f"])
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_chat_template_writes_chatml() -> None:
    theirs = AutoTokenizer.from_pretrained(PATH)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    answered = theirs.apply_chat_template([*messages, {"role": "assistant", "content": "Hello"}], tokenize=False)
    assert answered.startswith(text)
    assert theirs.eos_token == "<|im_end|>"


def test_pretraining_writes_what_the_chat_template_writes(tokenizer: Tokenizer) -> None:
    mixture = Mixture(Shelf([], routable=()), tokenizer)
    tokens, weights = mixture.chat(Chat("Be brief.", "Hi", "Hello"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert tokens == AutoTokenizer.from_pretrained(PATH).apply_chat_template(messages)["input_ids"]
    assert (
        tokenizer.decode([token for token, weight in zip(tokens, weights, strict=True) if weight > 1], skip_special_tokens=False)
        == "Hello<|im_end|>\n"
    )


def test_a_long_document_loses_its_end_and_keeps_the_answer(tokenizer: Tokenizer) -> None:
    mixture = Mixture(Shelf([], routable=()), tokenizer)
    tokens = mixture.chat(Chat("Route.", "word " * 2000, '{"package": "numpy"}')).tokens
    assert len(tokens) == MAX_TOKENS
    assert tokenizer.decode(tokens, skip_special_tokens=False).endswith('word<|im_end|>\n<|im_start|>assistant\n{"package": "numpy"}<|im_end|>\n')


def test_importing_the_package_loads_no_torch() -> None:
    program = "import sys; from bloomery.models.tiny import PATH; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_the_pretraining_config_is_the_shipped_one() -> None:
    shipped = json.loads((PATH / "config.json").read_text())
    assert {key: shipped[key] for key in CONFIG} == CONFIG
    assert sum(weight.numel() for weight in new_decoder().parameters()) >= 4 * 10**6


def test_the_rate_warms_up_and_ends_near_nothing() -> None:
    assert schedule(0, 0.0) < schedule(40, 0.0) == schedule(40, 0.3) == 1.0
    assert schedule(900, 0.999) < 0.02


def test_the_tokenizer_depends_on_its_texts_alone() -> None:
    texts = [document.text for document in _documents() for _ in range(3)]
    assert train_tokenizer(texts).to_str() == train_tokenizer(texts).to_str()


def test_documents_are_public_definitions_and_module_docstrings(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "kit.py").write_text('"""The tests of the kit are not documentation at all."""')
    (tmp_path / "kit.py").write_text(
        '"""A kit of tools that nobody ever needed before."""\nclass Tool(Base):\n    def hit(self, nail, *, hard=False):\n'
        '        """Hit the nail on its head, once."""\n    def _miss(self):\n        """Not for the public, whoever asks."""\n'
    )
    (tmp_path / "broken.py").write_text("this is not python")
    assert list(documents_under(tmp_path)) == [
        Document("A kit of tools that nobody ever needed before.", "kit"),
        Document("def Tool.hit(self, nail, *, hard=False)\nHit the nail on its head, once.", "kit"),
    ]


def test_routing_never_asks_for_a_package_that_must_stay_out(tokenizer: Tokenizer) -> None:
    documents = _documents()
    routable = routable_packages(documents, without={"asyncio"})
    assert routable == ["gamma", "numpy"]
    shelf, random = Shelf(documents, routable=routable), Random(3)
    assert {shelf.to_route(random).package for _ in range(200)} == {"gamma", "numpy"}
    assert "asyncio" in {shelf.any(random).package for _ in range(200)}


def test_routed_conversations_answer_with_the_package_or_its_module() -> None:
    random = Random(5)
    for _ in range(300):
        chat = route(random, Document("def dot(a, b)\nMultiply.", "numpy.linalg.inner"), ["numpy", "torch", "scipy", *map(str, range(20))])
        answer = next(iter(json.loads(chat.assistant).values())) if chat.assistant.startswith("{") else chat.assistant
        assert answer in {"numpy", "numpy.linalg"}
        if "numpy, torch" in chat.system:
            assert answer == "numpy"


@pytest.mark.parametrize("generator", GENERATORS)
def test_generated_conversations_depend_on_the_seed_alone(generator: Callable[[Random], Chat]) -> None:
    assert [generator(Random(seed)) for seed in range(50)] == [generator(Random(seed)) for seed in range(50)]
    assert all(chat.user and chat.assistant for chat in map(generator, map(Random, range(50))))


def test_descriptions_read_the_signature() -> None:
    document = Document("async def Loop.run(self, task, *, limit=None)\nRun it.", "loops")
    answers = {describe(Random(seed), document).assistant for seed in range(60)}
    assert answers == {'{"name": "Loop.run", "kind": "coroutine"}', "Loop.run", '["self", "task", "limit"]', "coroutine"}


def test_the_same_seed_draws_the_same_batch_of_about_the_size_asked_for(tokenizer: Tokenizer) -> None:
    documents = _documents()
    mixture = Mixture(Shelf(documents, routable=["gamma", "numpy"]), tokenizer)
    batch = mixture.batch(Random("1 7"), 3000)
    assert batch == mixture.batch(Random("1 7"), 3000)
    assert 3000 <= sum(len(sequence.tokens) for sequence in batch) < 3000 + CONTEXT
    assert all(len(sequence.tokens) == len(sequence.weights) for sequence in batch)


def test_long_sequences_fill_the_context(tokenizer: Tokenizer) -> None:
    assert len(Mixture(Shelf(_documents(), routable=()), tokenizer).long(Random(1)).tokens) == CONTEXT


def test_about_one_document_in_a_hundred_is_held_back() -> None:
    assert 5 < sum(held_back(Document(f"Document number {number}.", "numbers")) for number in range(1000)) < 25


def _documents() -> list[Document]:
    return [
        Document(f"def {package}_{n}(value, other={n})\nDo the thing number {n} of {package}.", f"{package}.core")
        for package in ("asyncio", "gamma", "numpy")
        for n in range(30)
    ]
