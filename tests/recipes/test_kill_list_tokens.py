"""The kill list, part C: token ids that drift between what was sampled and what is trained on.

Nothing in the path of the recipes tokenises an answer again. Loops that do are injected here: each conversation departs from what was served at a
known position, and an answer that is trained behind it is refused. The same answer behind the tokens that were served is not. What agents go on from
is in `test_kill_list_agents`.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer

from bloomery.client import Client, Sampler, sampling
from bloomery.client.sample_message import SampleAnswer
from bloomery.client.sampling import PendingSample, Sampled
from bloomery.models.tiny.tokenizer import CHAT_TEMPLATE
from bloomery.recipes.advantages import mean_over_tokens, sort_groups, weigh
from bloomery.recipes.agreement import check_on_policy, check_served
from bloomery.recipes.grpo import GrpoConfig, train
from bloomery.recipes.policy import Policy
from bloomery.recipes.rollouts import RolloutConfig, Rollouts
from bloomery.render import ChatTokenizer
from bloomery.types.errors import Corrupt, InvalidInput
from bloomery.types.operations import Datum, ForwardBackward, Operation
from tests.live import LiveServer, wait_until
from tests.recipes.loops import POLICY, PROBLEMS, SMALL, Record
from tests.recipes.served import Row, departure, rows
from tests.render.builders import write
from tests.test_docs import ROOT

TINY = ROOT / "bloomery" / "models" / "tiny" / "weights"
DOCS = ROOT / "docs" / "rl.md"
ASKED = {"role": "user", "content": "What is 12 and 30?"}
NEXT = {"role": "user", "content": "And 13?"}
TURN = "<|im_start|>user\nAnd 13?<|im_end|>\n<|im_start|>assistant\n"
WITHOUT_REASONING = CHAT_TEMPLATE.replace(
    "message['content'] +", "(message['content'].split('</think>')[-1] if message['role'] == 'assistant' else message['content']) +"
)
"""As Qwen3's does with earlier turns."""
WITH_CALLS = CHAT_TEMPLATE.replace(
    "message['content'] +",
    "message['content'] + ('<tool_call>\\n' + message.tool_calls[0].function | tojson + '\\n</tool_call>' if message.tool_calls else '') +",
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}

EPISODE = "kill-list-tokens"
Pair = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens, and the log-probability of each."""


@dataclass(frozen=True)
class Drift:
    """One way in which a conversation is told anew, as `docs/rl.md` has it, with the threads of those who met it."""

    name: str
    threads: tuple[str, ...]
    answer: str
    """The text of what was sampled."""
    again: Callable[[ChatTokenizer, list[int]], list[int]]
    """The conversation up to its next answer, from the tokens that were served."""
    at: str
    """The text that was served from the departure on begins so."""
    template: str = CHAT_TEMPLATE
    spelled: bool = False
    """Whether the answer was sampled letter by letter: a model may."""


def told_again(message: dict[str, object]) -> Callable[[ChatTokenizer, list[int]], list[int]]:
    """The template writes it from messages, with this one as the answer."""
    return lambda tokenizer, served: tokenizer.render_prompt([ASKED, {"role": "assistant", **message}, NEXT])


DRIFTS = (
    Drift(
        "newline behind an end token left out",
        ("verl#3720",),
        "It is 42.",
        lambda tokenizer, served: [*served, *tokenizer.encode(TURN)],
        at="",
    ),
    Drift(
        "calls of tools left out of the history",
        ("verl#3960",),
        '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>',
        told_again({"content": ""}),
        at="<tool_call>",
        template=WITH_CALLS,
    ),
    Drift(
        "calls of tools written anew",
        ("verl#6719",),
        '<tool_call>\n{"name":"add","arguments":{"a":12,"b":30}}\n</tool_call>',
        told_again({"content": "", "tool_calls": [CALL]}),
        at='"add"',
        template=WITH_CALLS,
    ),
    Drift(
        "pieces joined otherwise",
        ("verl#6719",),
        "The answer is 42.",
        told_again({"content": "The answer is 42."}),
        at="The answer",
        spelled=True,
    ),
    Drift(
        "reasoning left out of the history",
        ("prime-rl#1334", "ART#726"),
        "<think>I add.</think>42.",
        told_again({"content": "<think>I add.</think>42."}),
        at="<think>",
        template=WITHOUT_REASONING,
    ),
)
LATER = {"answer tokenised again": "ms-swift#10012"}
"""Faults with a test of their own below."""


@pytest.fixture(scope="module")
def newest(live_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    with Client(live_server.url, live_server.key) as client:
        return Policy.open(client, POLICY, tmp_path_factory.mktemp("policy") / "cursor", "kill list").cursor.version


@pytest.fixture
def tokenizer_of(tmp_path: Path) -> Iterator[Callable[[str], ChatTokenizer]]:
    """The tokenizer of the shipped model with a template."""
    made: list[ChatTokenizer] = []

    def make(template: str) -> ChatTokenizer:
        tokens = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        made.append(ChatTokenizer.load(write(tmp_path / "tokenizer", tokens, tokenizer_config={"eos_token": "<|im_end|>"}, chat_template=template)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def pieces(tokenizer: ChatTokenizer, drift: Drift) -> list[int]:
    """The answer as it was sampled, with the token that ended it."""
    parts = drift.answer if drift.spelled else [drift.answer]
    return [*(token for part in parts for token in tokenizer.encode(part)), tokenizer.added_tokens["<|im_end|>"]]


def answered(sampler: Sampler, behind: Sequence[int]) -> Row:
    """The next answer, as it was sampled behind these tokens."""
    sampled = sampler.sample(behind, max_tokens=24, seed=3).result()
    (answer,) = sampled.sequences
    tokens = (*behind, *answer.tokens)
    return Row(tokens, tuple(range(len(behind), len(tokens))), answer.logprobs, (sampled.version,) * len(answer.tokens))


def behind_others(row: Row, begun: int, others: Sequence[int]) -> Row:
    """The same answer behind other tokens."""
    moved = len(others) - begun
    return row._replace(tokens=(*others, *row.tokens[begun:]), places=tuple(place + moved for place in row.places))


@pytest.mark.parametrize("drift", DRIFTS, ids=lambda drift: drift.name.replace(" ", "-"))
def test_a_conversation_told_anew_departs_from_what_was_served_and_an_answer_behind_it_is_refused(
    client: Client, newest: str, tokenizer_of: Callable[[str], ChatTokenizer], drift: Drift
) -> None:
    tokenizer = tokenizer_of(drift.template)
    served = [*tokenizer.render_prompt([ASKED]), *pieces(tokenizer, drift)]
    goes_on = [*served, *tokenizer.encode("\n" + TURN)]
    again = drift.again(tokenizer, served)
    place = departure(goes_on, again)
    assert place is not None
    assert tokenizer.decode(goes_on[place:]).startswith(drift.at)
    assert (place >= len(served)) is (drift.at == "")
    answer = answered(client.sampler(newest), goes_on)
    assert check_served([answer], client.sampler, "exact")[newest].largest == 0
    with pytest.raises(Corrupt, match=f"version `{newest}` gives other log-probabilities"):
        check_served([behind_others(answer, len(goes_on), again)], client.sampler, "plain")


def test_a_template_that_only_appends_goes_on_from_what_was_served(tokenizer_of: Callable[[str], ChatTokenizer]) -> None:
    tokenizer = tokenizer_of(CHAT_TEMPLATE)
    served = [*tokenizer.render_prompt([ASKED]), *tokenizer.encode("It is 42.<|im_end|>")]
    again = told_again({"content": "It is 42."})(tokenizer, served)
    assert departure(served, again) is None
    assert again == [*served, *tokenizer.encode("\n" + TURN)]


def test_a_template_that_rewrites_earlier_turns_is_refused_where_conversations_are_rendered_for_training(
    tokenizer_of: Callable[[str], ChatTokenizer],
) -> None:
    messages = [ASKED, {"role": "assistant", "content": "<think>I add.</think>42."}, NEXT, {"role": "assistant", "content": "43."}]
    assert sum(tokenizer_of(CHAT_TEMPLATE).render_training(messages).weights) > 2
    rewriting = WITHOUT_REASONING.replace("message['role'] == 'assistant'", "message['role'] == 'assistant' and not loop.last")
    with pytest.raises(InvalidInput, match="writes message 1 differently when more messages follow"):
        tokenizer_of(rewriting).render_training(messages)


@pytest.mark.slow
def test_an_answer_that_is_tokenised_again_has_other_ids_and_is_refused(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ChatTokenizer.load(TINY)
    policy = Policy.open(client, POLICY, tmp_path / "cursor", "kill list")
    version = policy.cursor.version
    rollouts = Rollouts(lambda: policy.sampler, Record().grade, RolloutConfig(group_size=8, max_tokens=48, seed=1))
    served = rollouts.group(0, PROBLEMS[0])
    check_served(rows(served), client.sampler, "exact")
    texts = [(member.rollout.tokens, tokenizer.encode(tokenizer.decode(member.rollout.tokens))) for member in served.members]
    places = [departure(tokens, again) for tokens, again in texts]
    assert any(place is not None for place in places)
    result = PendingSample.result

    def through_text(self: PendingSample, timeout_s: float = 600.0) -> Sampled:
        # As of a program that asks for text: it aligns as much as it can.
        sampled, sequences = result(self, timeout_s), []
        for sequence in sampled.sequences:
            again = tokenizer.encode(tokenizer.decode(sequence.tokens))[: len(sequence.tokens)]
            sequences.append(sequence._replace(tokens=tuple(again), logprobs=sequence.logprobs[: len(again)]))
        return sampled._replace(sequences=tuple(sequences))

    monkeypatch.setattr(PendingSample, "result", through_text)
    drifted = rollouts.group(0, PROBLEMS[0])
    with pytest.raises(Corrupt, match=f"version `{version}` gives other log-probabilities.*at token [0-9]+ of sequence [0-7]"):
        check_served(rows(drifted), client.sampler, "plain")
    data = mean_over_tokens(weigh(sort_groups([drifted], 2).trained, by_deviation=True))
    with pytest.raises(Corrupt, match=f"version `{version}` gives other log-probabilities"):
        check_on_policy(policy.train([row.datum for row in data], [0]), version, "plain")


class Recording(httpx.BaseTransport):
    """Asks for everything to be kept, and keeps itself what is trained on, as it goes to the server."""

    def __init__(self) -> None:
        self._wire = httpx.HTTPTransport()
        self.trained: list[Pair] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.headers["x-bloomery-consent"] = "train"
        request.headers["x-bloomery-episode"] = EPISODE
        if request.headers.get("content-type") == "application/msgpack":
            operation = msgspec.msgpack.decode(request.read(), type=Operation)
            if isinstance(operation, ForwardBackward):
                self.trained += [trained_on(datum) for datum in operation.data]
        return self._wire.handle_request(request)

    def close(self) -> None:
        self._wire.close()


def trained_on(datum: Datum) -> Pair:
    """The tokens behind a prompt of these problems, and their log-probabilities."""
    begun = len(PROBLEMS[0].prompt) - 1
    return tuple(datum.inputs["target_tokens"].numpy()[begun:].tolist()), tuple(datum.inputs["logprobs"].numpy()[begun:].tolist())


def recorded(server: LiveServer) -> set[Pair]:
    """What the server's spans of the episode hold."""
    with httpx.Client(base_url=server.url, headers={"x-api-key": server.key}) as http:
        spans = http.get("/api/v1/spans", params={"episode": EPISODE, "limit": 100}).raise_for_status().json()["data"]
        bodies = [http.get(f"/api/v1/spans/{span['id']}").raise_for_status().json()["body"] for span in spans]
    return {(tuple(sample["tokens"]), tuple(sample["logprobs"])) for body in bodies for sample in body["tokens"]["samples"] if sample["tokens"]}


@pytest.mark.slow
def test_what_is_trained_on_is_what_was_answered_and_recorded_id_for_id_and_bit_for_bit(
    live_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, recording = sampling.read_answer, Recording()
    answered_with: set[Pair] = set()

    def noted(body: bytes) -> SampleAnswer:
        answer = read(body)
        # A text that is only scored, which holds these rollouts too, has an empty continuation.
        answered_with.update((sequence.tokens, sequence.logprobs) for sequence in answer.sequences if sequence.tokens)
        return answer

    monkeypatch.setattr(sampling, "read_answer", noted)
    with Client(live_server.url, live_server.key, transport=recording) as client:
        train(client, PROBLEMS, Record().grade, GrpoConfig(policy=POLICY, rollouts=SMALL, groups_per_step=2), tmp_path / "cursor", steps=2)
    assert len(recording.trained) == 2 * 2 * SMALL.group_size
    assert set(recording.trained) == answered_with
    wait_until(lambda: recorded(live_server) >= answered_with)
    assert recorded(live_server) == answered_with


def imported(path: Path) -> set[str]:
    """The modules that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)} | {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }


def reached(module: str, seen: set[str]) -> set[str]:
    """All modules that this one imports, through those of the recipes and of the client."""
    if module not in seen:
        seen.add(module)
        if module.startswith(("bloomery.recipes", "bloomery.client")):
            path = ROOT.joinpath(*module.split("."))
            for other in imported(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")):
                reached(other, seen)
    return seen


@pytest.mark.parametrize("module", ["grpo", "async_grpo", "agreement", "holding", "segments", "advantages", "policy"])
def test_nothing_between_an_answer_and_its_datum_can_tokenise(module: str) -> None:
    modules = reached(f"bloomery.recipes.{module}", set())
    assert module == "segments" or {"bloomery.client.sampling", "bloomery.client.sample_message"} <= modules
    assert not [module for module in modules if module.startswith(("bloomery.render", "tokenizers", "transformers"))]


def test_every_drift_stands_in_the_docs_with_its_threads() -> None:
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    for name, threads in [*((drift.name, drift.threads) for drift in DRIFTS), *((name, (thread,)) for name, thread in LATER.items())]:
        assert any(name in line and all(thread in line for thread in threads) for line in lines), name
