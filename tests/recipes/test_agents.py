"""Agents with the real, unmodified OpenAI client: what is trained is what was served, and whatever goes wrong has a kind."""

import json
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bloomery.client import Client, Sampler
from bloomery.recipes import async_grpo
from bloomery.recipes.advantages import weigh
from bloomery.recipes.agents import Agents, Episode
from bloomery.recipes.grpo import GrpoConfig, StepReport, measure, train
from bloomery.recipes.rewards import Reward
from bloomery.recipes.rollouts import Failure, Graded, Group, Problem, RolloutConfig
from bloomery.render import ChatTokenizer
from bloomery.types.errors import BloomeryError, Forbidden, Gone, InvalidInput, NotFound, Unauthorized
from tests.api.server import serving
from tests.live import LiveServer
from tests.openai.tool_model import SUM
from tests.recipes.loops import BASE, POLICY

PROBLEM = Problem("sum", (), data=(3, 4))
CONFIG = RolloutConfig(group_size=2, max_tokens=6, attempts=1, seed=5)


@pytest.fixture
def sampler(client: Client) -> Sampler:
    return client.sampler(BASE)


def asks(episode: Episode) -> openai.OpenAI:
    return openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)


def group_of(agent: Callable[[Episode], Any], tokenizer: ChatTokenizer, sampler: Sampler, config: RolloutConfig = CONFIG, **options: Any) -> Group:
    with Agents(agent, tokenizer, **options) as agents:
        return agents.rollouts(lambda: sampler, config).group(7, PROBLEM)


def with_a_tool(episode: Episode) -> float:
    """Asks, has its tool add, and asks again with what the tool said."""
    with asks(episode) as model:
        messages: list[Any] = [{"role": "system", "content": "Call a tool: add."}, {"role": "user", "content": "What is 3+4?"}]
        first = model.chat.completions.create(model=episode.model, messages=messages)
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": "1", "content": str(sum(episode.problem.data))}]
        second = model.chat.completions.create(model=episode.model, messages=messages)
        assert second.system_fingerprint == first.system_fingerprint
    return float(len(first.choices[0].message.content or "") + len(second.choices[0].message.content or ""))


def test_the_tokens_trained_are_the_tokens_served_and_their_log_probabilities_are_the_trainers_to_the_bit(
    client: Client, tokenizer: ChatTokenizer
) -> None:
    run = client.create_run(BASE, rank=4, seed=1)
    sampler = client.sampler(run.save_snapshot().result().version)
    group = group_of(with_a_tool, tokenizer, sampler)
    assert (len(group.members), group.failures) == (2, ())
    members = tuple(member._replace(reward=float(place)) for place, member in enumerate(group.members))
    rows = weigh([group._replace(members=members)], by_deviation=True)
    scored = run.forward([row.datum for row in rows], "importance_sampling").result()
    assert (scored.metrics["k3:sum"], scored.metrics["logprob_diff:max"]) == (0, 0)
    for row, output in zip(rows, scored.outputs, strict=True):
        assert output["logprobs"].numpy()[[place - 1 for place in row.segment.places]].tolist() == list(row.segment.logprobs)
        assert set(row.segment.versions) == {sampler.model}
    for member in group.members:
        assert len(member.rollout.answers) == 2
        assert sum(len(segment.sampled) for segment in member.rollout.segments) == len(member.rollout.tokens)


def test_what_tools_and_users_said_is_there_to_be_read_and_has_no_loss(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    heard: dict[str, list[str]] = {}

    def agent(episode: Episode) -> float:
        with asks(episode) as model:
            messages: list[Any] = [{"role": "user", "content": "Say red."}]
            for _ in range(3):
                answer = model.chat.completions.create(model=episode.model, messages=messages).choices[0]
                heard.setdefault(episode.rollout_id, []).append(answer.message.content or "")
                messages += [answer.message, {"role": "tool", "tool_call_id": "1", "content": "SECRET"}]
        return 1.0

    for member in group_of(agent, tokenizer, sampler, RolloutConfig(group_size=4, max_tokens=8, attempts=1, seed=2)).members:
        segments = member.rollout.segments
        assert len(member.rollout.answers) == 3
        assert any("SECRET" in tokenizer.decode(segment.tokens) for segment in segments)
        for segment in segments:
            assert "SECRET" not in tokenizer.decode(segment.sampled)
        by_answer = {answer: [] for answer in member.rollout.answers}
        for segment in segments:
            for answer, token in zip(segment.turns, segment.sampled, strict=True):
                by_answer[answer].append(token)
        said = [tokenizer.decode([token for token in tokens if token not in tokenizer.end_tokens]) for tokens in by_answer.values()]
        assert said == heard[member.rollout.id]
        # A conversation is one segment, unless an answer was not spelled as the tokenizer would have.
        assert len(segments) == 1 + sum(segment.drift is not None for segment in segments)


def test_an_agent_that_asks_the_same_is_answered_the_same_and_one_that_asks_twice_is_not(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    def agent(episode: Episode) -> float:
        with asks(episode) as model:
            for _ in range(2):
                model.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": "Say a word."}])
        return 1.0

    first, again = (group_of(agent, tokenizer, sampler) for _ in range(2))
    assert first == again
    rollouts = [member.rollout for member in first.members]
    assert len({segment.tokens for rollout in rollouts for segment in rollout.segments}) == 4


def test_sub_agents_side_by_side_are_segments_of_one_rollout_in_one_order(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    def agent(episode: Episode) -> float:
        with asks(episode) as model:

            def ask(word: str) -> None:
                model.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": f"Say {word}."}])

            threads = [threading.Thread(target=ask, args=(word,)) for word in ("red", "blue", "green")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        return 1.0

    first, again = (group_of(agent, tokenizer, sampler) for _ in range(2))
    assert [member.rollout.laid_out for member in first.members] == [member.rollout.laid_out for member in again.members]
    assert all(len(member.rollout.segments) == 3 for member in first.members)
    assert all(segment.drift is None for member in first.members for segment in member.rollout.segments)


def once(episode: Episode) -> openai.types.chat.ChatCompletion:
    with asks(episode) as model:
        return model.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": "Say a word."}])


def report(episode: Episode, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {episode.api_key}", "content-type": "application/json"}
    return httpx.post(f"{episode.base_url}/reward", content=json.dumps(body), headers=headers)


def found_in_the_cache(server: LiveServer) -> int:
    """Tokens of prompts whose keys and values were there, since the server began."""
    told = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {server.key}"}).raise_for_status().text
    return sum(int(float(line.rpartition(" ")[2])) for line in told.splitlines() if line.startswith("vllm:prefix_cache_hits_total"))


def test_a_second_turn_is_served_from_what_was_computed_in_the_first(live_server: LiveServer, tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    found: list[int] = []

    def agent(episode: Episode) -> float:
        messages: list[Any] = [{"role": "user", "content": "Nobody else has asked for heliotrope, quartz or a second helping of rhubarb here."}]
        with asks(episode) as model:
            for _ in range(2):
                before = found_in_the_cache(live_server)
                answer = model.chat.completions.create(model=episode.model, messages=messages).choices[0].message
                found.append(found_in_the_cache(live_server) - before)
                messages += [answer, {"role": "user", "content": "And then?"}]
        return 1.0

    (member,) = group_of(agent, tokenizer, sampler, RolloutConfig(group_size=1, max_tokens=6, attempts=1, seed=5)).members
    (segment,) = member.rollout.segments
    first = [place for place, turn in zip(segment.places, segment.turns, strict=True) if turn == member.rollout.answers[0]]
    # The last token of an answer was sampled, and not read yet.
    assert found[1] >= first[-1]
    assert found[1] > found[0]


def test_what_branches_share_is_computed_once(live_server: LiveServer, tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    found: list[int] = []

    def agent(episode: Episode) -> float:
        trunk: list[Any] = [{"role": "user", "content": "Nobody has asked for saffron, obsidian or the fourth verse of a lullaby either."}]
        with asks(episode) as model:

            def ask(*behind: Any) -> Any:
                before = found_in_the_cache(live_server)
                answer = model.chat.completions.create(model=episode.model, messages=[*trunk, *behind]).choices[0].message
                found.append(found_in_the_cache(live_server) - before)
                return answer

            trunk.append(ask())
            for word in ("red", "blue", "green"):
                ask({"role": "user", "content": f"Say {word}."})
        return 1.0

    (member,) = group_of(agent, tokenizer, sampler, RolloutConfig(group_size=1, max_tokens=6, attempts=1, seed=5)).members
    trunk, *branches = member.rollout.answers
    segments = {turn: segment for segment in member.rollout.segments for turn in segment.turns}
    # One branch goes on in the trunk's own segment, and the others are segments of their own.
    assert len(member.rollout.segments) == len(branches)
    first = segments[trunk]
    shared = [place for place, turn in zip(first.places, first.turns, strict=True) if turn == trunk][-1]
    for branch, there in zip(branches, found[1:], strict=True):
        assert segments[branch].tokens[:shared] == first.tokens[:shared]
        # The last token of an answer was sampled, and not read yet; of what comes behind it nothing was known.
        assert shared <= there < segments[branch].places[-1]
    assert found[0] < shared


def test_a_reward_may_be_reported_by_callback_with_those_of_single_answers(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    def agent(episode: Episode) -> None:
        answer = once(episode)
        report(episode, reward=0.5, turns={answer.id: 2.0}, parts={"form": 1.0}).raise_for_status()

    for member in group_of(agent, tokenizer, sampler).members:
        assert (member.reward, member.parts, member.turns) == (0.5, {"form": 1.0}, ((member.rollout.answers[0], 2.0),))


def raises(episode: Episode) -> float:
    once(episode)
    raise ValueError("the tool broke")


def asks_for_nothing(episode: Episode) -> float:
    return 1.0


def is_told_nothing(episode: Episode) -> None:
    once(episode)


def reports_not_a_number(episode: Episode) -> None:
    once(episode)
    report(episode, reward=math.nan).raise_for_status()


def reports_a_word(episode: Episode) -> None:
    once(episode)
    report(episode, reward="good").raise_for_status()


def reports_a_word_as_a_part_and_does_not_look(episode: Episode) -> None:
    once(episode)
    report(episode, reward=1.0, parts={"form": "good"})


def reports_for_another(episode: Episode) -> None:
    once(episode)
    report(episode, reward=1.0, rollout_id="99.0").raise_for_status()


def rewards_an_answer_of_another(episode: Episode) -> Reward:
    once(episode)
    return Reward(episode.rollout_id, 1.0, turns={"chatcmpl-other": 1.0})


def asks_coldly(episode: Episode) -> float:
    with asks(episode) as model:
        model.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": "Say a word."}], temperature=0)
    return 1.0


@pytest.mark.parametrize(
    ("agent", "kind", "message"),
    [
        (raises, "raised", "ValueError: the tool broke"),
        (asks_for_nothing, "no_tokens", "nothing to train on"),
        (is_told_nothing, "no_reward", "gave nothing"),
        (reports_not_a_number, "not_finite", "nan"),
        (reports_a_word, "wrong_type", "str"),
        (reports_a_word_as_a_part_and_does_not_look, "wrong_type", "`parts.form` is a str"),
        (reports_for_another, "foreign_reward", "99.0"),
        (rewards_an_answer_of_another, "foreign_reward", "chatcmpl-other"),
        (asks_coldly, "raised", "`temperature` can only be 1"),
    ],
)
def test_whatever_goes_wrong_is_a_failure_with_a_kind_and_no_reward(
    tokenizer: ChatTokenizer, sampler: Sampler, agent: Callable[[Episode], Any], kind: str, message: str
) -> None:
    group = group_of(agent, tokenizer, sampler, RolloutConfig(group_size=2, max_tokens=2, attempts=2))
    assert group.members == ()
    assert Counter((failure.kind, failure.final) for failure in group.failures) == {(kind, False): 2, (kind, True): 2}
    assert all(message in failure.message for failure in group.failures)


def test_an_agent_that_hangs_is_late_alone_and_what_it_asks_afterwards_is_nobodys(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    release, refused = threading.Event(), threading.Event()

    def agent(episode: Episode) -> float:
        if episode.rollout_id.endswith(".1"):
            release.wait(300)
            with suppress(openai.AuthenticationError):
                once(episode)
                return 1.0
            refused.set()
        else:
            once(episode)
        return 1.0

    with Agents(agent, tokenizer, timeout_s=20) as agents:
        group = agents.rollouts(lambda: sampler, CONFIG).group(7, PROBLEM)
        release.set()
        assert refused.wait(120)
    assert [member.rollout.id for member in group.members] == ["7.0"]
    assert [(failure.rollout_id, failure.kind, failure.final) for failure in group.failures] == [("7.1", "timeout", True)]


def test_an_agent_that_failed_once_is_tried_again_as_itself(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    seen: dict[str, list[str]] = {}

    def agent(episode: Episode) -> float:
        attempts = seen.setdefault(episode.rollout_id, [])
        attempts.append(once(episode).choices[0].message.content or "")
        if len(attempts) < 2:
            raise OSError("the tool is busy")
        return 1.0

    group = group_of(agent, tokenizer, sampler, RolloutConfig(group_size=2, max_tokens=6, attempts=3))
    assert [member.reward for member in group.members] == [1.0, 1.0]
    assert [(failure.kind, failure.final) for failure in group.failures] == [("raised", False)] * 2
    assert all(first == second for first, second in seen.values())


def test_an_answer_that_nobody_waited_for_is_no_part_of_the_rollout(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    read: dict[str, str] = {}

    def agent(episode: Episode) -> float:
        with asks(episode) as model, suppress(openai.APITimeoutError):
            hasty = model.with_options(timeout=0.001, max_retries=0)
            hasty.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": "Say a word."}])
        read[episode.rollout_id] = once(episode).id
        return 1.0

    for member in group_of(agent, tokenizer, sampler).members:
        assert member.rollout.answers == (read[member.rollout.id],)


def test_an_agent_whose_server_is_away_did_nothing_wrong(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    with serving(tmp_path) as server, server.client(patience_s=0.1) as client:
        sampler = client.sampler("tiny")
        server.stop()
        group = group_of(once, tokenizer, sampler)
    assert group.members == ()
    assert [(failure.kind, failure.final) for failure in group.failures] == [("sampling", True)] * 2


class Unwell(httpx.BaseTransport):
    """Of a server that fails at some of the samples that it is asked for, by their number."""

    def __init__(self, *fails: int) -> None:
        self._wire, self._numbers, self._fails = httpx.HTTPTransport(), count(), fails

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/v1/asample" and next(self._numbers) in self._fails:
            return httpx.Response(500, json={"error": "the engine broke", "category": "server", "code": "worker", "field": None})
        return self._wire.handle_request(request)

    def close(self) -> None:
        self._wire.close()


def swallowing(*words: str, reports: bool = False) -> Callable[[Episode], float | None]:
    """An agent that says each word in turn, and takes an error of the server for an answer that deserves nothing."""

    def agent(episode: Episode) -> float | None:
        reward = 1.0
        with asks(episode) as model:
            for word in words:
                try:
                    model.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": f"Say {word}."}])
                except openai.APIStatusError:
                    reward = 0.0
        if not reports:
            return reward
        report(episode, reward=reward).raise_for_status()
        return None

    return agent


def group_of_one(server: LiveServer, tokenizer: ChatTokenizer, agent: Callable[[Episode], Any], *fails: int, attempts: int = 1) -> Group:
    with Client(server.url, server.key, transport=Unwell(*fails)) as client:
        return group_of(agent, tokenizer, client.sampler(BASE), RolloutConfig(group_size=1, max_tokens=4, attempts=attempts))


@pytest.mark.parametrize("reports", [False, True])
def test_an_agent_that_takes_an_error_of_the_server_for_a_zero_has_no_reward(
    live_server: LiveServer, tokenizer: ChatTokenizer, reports: bool
) -> None:
    agent = swallowing("red", "blue", reports=reports)
    assert [member.reward for member in group_of_one(live_server, tokenizer, agent).members] == [1.0]
    failed = group_of_one(live_server, tokenizer, agent, 1)
    assert (failed.members, failed.failures) == ((), (Failure("7.0", "sampling", "the engine broke", final=True),))
    # Tried again it asks the same, and is answered.
    again = group_of_one(live_server, tokenizer, agent, 1, attempts=2)
    assert [member.reward for member in again.members] == [1.0]
    assert [(failure.kind, failure.final) for failure in again.failures] == [("sampling", False)]


class Refusing(Unwell):
    """Of a server that refuses the second sample: as it is asked for, or when its future is asked for."""

    def __init__(self, path: str, status: int, code: str) -> None:
        super().__init__()
        self._path, self._status, self._code = path, status, code

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == self._path and next(self._numbers) == 1:
            return httpx.Response(self._status, json={"error": "not with this one", "category": "user", "code": self._code})
        return self._wire.handle_request(request)


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/api/v1/asample", 401, Unauthorized),
        ("/api/v1/asample", 403, Forbidden),
        ("/api/v1/asample", 404, NotFound),
        ("/api/v1/asample", 410, Gone),
        ("/api/v1/retrieve_future", 404, NotFound),
        # A sample that was taken fails with status 200.
        ("/api/v1/retrieve_future", 200, InvalidInput),
    ],
)
def test_what_no_agent_can_mend_ends_the_loop_with_its_own_error_whatever_the_agent_made_of_it(
    live_server: LiveServer, tokenizer: ChatTokenizer, path: str, status: int, kind: type[BloomeryError]
) -> None:
    with Client(live_server.url, live_server.key, transport=Refusing(path, status, kind.code)) as client, pytest.raises(kind, match="not with this"):
        group_of(swallowing("red", "blue"), tokenizer, client.sampler(BASE), RolloutConfig(group_size=1, max_tokens=4))


def test_an_agent_that_asked_the_same_again_and_was_answered_has_the_reward_that_it_returned(
    live_server: LiveServer, tokenizer: ChatTokenizer
) -> None:
    again = group_of_one(live_server, tokenizer, swallowing("red", "red", "blue"), 0)
    assert ([member.reward for member in again.members], again.failures) == ([0.0], ())
    # An answer of before says nothing of the one that failed, and neither does one to something else.
    for words, fails in ((("red", "red"), 1), (("red", "blue"), 0)):
        assert [failure.kind for failure in group_of_one(live_server, tokenizer, swallowing(*words), fails).failures] == ["sampling"]


def test_streams_are_read_by_whoever_asks_for_them(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    heard: dict[str, str] = {}

    def agent(episode: Episode) -> float:
        with asks(episode) as model:
            chunks = list(model.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": "Say red."}], stream=True))
        heard[episode.rollout_id] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return 1.0

    for member in group_of(agent, tokenizer, sampler).members:
        tokens = member.rollout.tokens[:-1] if member.rollout.stopped else member.rollout.tokens
        assert tokenizer.decode(tokens) == heard[member.rollout.id]


def test_tools_are_told_to_the_model_and_calls_in_a_history_are_written_as_its_template_writes_them(
    tool_tokenizer: ChatTokenizer, sampler: Sampler
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": 3}'}}
    tool: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SUM}}

    def agent(episode: Episode) -> float:
        messages: list[Any] = [{"role": "user", "content": "What is 12+3?"}, {"role": "assistant", "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": "c1", "content": "15"})
        with asks(episode) as model:
            for _ in range(2):
                answer = model.chat.completions.create(model=episode.model, messages=messages, tools=[tool]).choices[0]
                messages += [answer.message, {"role": "user", "content": "And then?"}]
        return 1.0

    (first, second) = group_of(agent, tool_tokenizer, sampler).members
    for rollout in (first.rollout, second.rollout):
        read = tool_tokenizer.decode(rollout.segments[0].tokens)
        assert '"description": "Adds."' in read
        assert '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 3}}\n</tool_call>' in read
        assert "Adds." not in tool_tokenizer.decode(rollout.tokens)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": "policy"}', b'{"model": "other", "messages": []}', b'{"logprobs": true}'])
def test_a_body_that_is_none_is_refused_and_the_door_stays_open(tokenizer: ChatTokenizer, sampler: Sampler, body: bytes) -> None:
    def agent(episode: Episode) -> float:
        refused = httpx.post(f"{episode.base_url}/chat/completions", content=body, headers={"authorization": f"Bearer {episode.api_key}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid")
        assert httpx.post(f"{episode.base_url}/chat/completions", json={}).status_code == 401
        assert httpx.post(f"{episode.base_url}/else", json={}, headers={"authorization": f"Bearer {episode.api_key}"}).status_code == 404
        once(episode)
        return 1.0

    group = group_of(agent, tokenizer, sampler, RolloutConfig(group_size=1, max_tokens=2, attempts=1))
    assert group.failures == ()


def test_the_model_to_ask_is_listed_as_the_contract_lists_models_and_only_to_whom_the_key_belongs(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    def agent(episode: Episode) -> float:
        with asks(episode) as model:
            (listed,) = model.models.list()
            assert (listed.id, listed.object, listed.owned_by) == (episode.model, "model", "bloomery")
            assert model.models.retrieve(episode.model) == listed
            with pytest.raises(openai.NotFoundError, match="the only model is `organisation/policy`"):
                model.models.retrieve("other")
        assert httpx.get(f"{episode.keyed_url}/models").json()["data"][0]["id"] == episode.model
        assert httpx.get(f"{episode.base_url}/models").status_code == 401
        once(episode)
        return 1.0

    config = RolloutConfig(group_size=1, max_tokens=2, attempts=1)
    assert group_of(agent, tokenizer, sampler, config, model="organisation/policy").failures == ()


POST = b"POST /v1/chat/completions HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"PUT /v1/chat/completions HTTP/1.1\r\n\r\n", 501),
        (b"GET /v1/else HTTP/1.1\r\nauthorization: Bearer KEY\r\ncontent-length: 2\r\n\r\n{}", 404),
        (b"POST /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (POST + b"".join(b"x-%d: 1\r\n" % number for number in range(200)) + b"\r\n", 431),
        (POST + b"authorization: Bearer KEY\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n", 413),
        (POST + b"authorization: Bearer KEY\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 413),
    ],
    ids=["method", "body-of-a-get", "path", "headers", "length", "chunks"],
)
def test_what_is_no_request_is_refused_in_the_words_of_the_contract_and_ends_its_connection(
    tokenizer: ChatTokenizer, sampler: Sampler, sent: bytes, status: int
) -> None:
    def agent(episode: Episode) -> float:
        url = httpx.URL(episode.base_url)
        with socket.create_connection((url.host, url.port or 0), timeout=30) as connection:
            connection.sendall(sent.replace(b"KEY", episode.api_key.encode()))
            with connection.makefile("rb") as answer:
                head, _, body = answer.read().partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        once(episode)
        return 1.0

    assert group_of(agent, tokenizer, sampler, RolloutConfig(group_size=1, max_tokens=2, attempts=1)).failures == ()


def test_a_body_that_broke_off_is_no_report(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    def agent(episode: Episode) -> None:
        once(episode)
        url = httpx.URL(episode.base_url)
        head = f"POST /v1/reward HTTP/1.1\r\nauthorization: Bearer {episode.api_key}\r\ncontent-length: 50\r\n\r\n"
        with socket.create_connection((url.host, url.port or 0), timeout=30) as connection:
            connection.sendall(head.encode() + b'{"reward": 1}')
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as answer:
                assert b"the body ended after 13 bytes, and said that it has 50" in answer.read()

    (failure,) = group_of(agent, tokenizer, sampler, RolloutConfig(group_size=1, max_tokens=2, attempts=1)).failures
    assert failure.kind == "no_reward"


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"reward": "good"}, "reward"),
    ({"reward": None}, "reward"),
    ({"reward": math.nan}, "reward"),
    ({"reward": 10**400}, "reward"),
    ({"reward": 1e308}, "reward"),
    ({"parts": {}}, "reward"),
    ({"reward": 1.0, "parts": None}, "parts"),
    ({"reward": 1.0, "parts": {"x": "bad"}}, "parts.x"),
    ({"reward": 1.0, "parts": {"x": None}}, "parts.x"),
    ({"reward": 1.0, "parts": {"x": math.inf}}, "parts.x"),
    ({"reward": 1.0, "parts": {"half \ud83d": 1.0}}, "parts"),
    ({"reward": 1.0, "parts": {"x" * 200: 1.0}}, "parts"),
    ({"reward": 1.0, "parts": {str(number): 1.0 for number in range(200)}}, "parts"),
    ({"reward": 1.0, "turns": [1.0]}, "turns"),
    ({"reward": 1.0, "turns": {"a": "1"}}, "turns.a"),
    ({"reward": 1.0, "rollout_id": 7}, "rollout_id"),
    ({"reward": 1.0, "grade": 1.0}, "grade"),
]


@pytest.mark.slow
def test_a_report_that_is_malformed_is_refused_by_its_field_and_a_better_one_is_taken(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    def agent(episode: Episode) -> None:
        once(episode)
        for body, field in MALFORMED:
            refused = report(episode, **body)
            told = refused.json()["error"]
            assert (refused.status_code, told["code"], told["param"]) == (400, "invalid", field), body
            assert field in told["message"] or field == "grade"
        report(episode, reward=0.25, parts={"x": 1}).raise_for_status()

    group = group_of(agent, tokenizer, sampler)
    assert group.failures == ()
    assert [(member.reward, member.parts) for member in group.members] == [(0.25, {"x": 1.0})] * 2


def test_what_was_reported_before_a_malformed_report_stands(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    def agent(episode: Episode) -> None:
        once(episode)
        report(episode, reward=0.5).raise_for_status()
        report(episode, reward="better")

    assert [member.reward for member in group_of(agent, tokenizer, sampler).members] == [0.5, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["synchronous", "asynchronous"])
def test_agents_train_in_both_loops_on_policy_to_the_bit(client: Client, tokenizer: ChatTokenizer, tmp_path: Path, loop: str) -> None:
    reports: list[StepReport] = []
    problems = [Problem(str(number), (), data=(number, 4)) for number in range(3)]
    rollouts = RolloutConfig(group_size=3, max_tokens=6, seed=3)
    with Agents(with_a_tool, tokenizer) as agents:
        if loop == "synchronous":
            plain = GrpoConfig(policy=POLICY, rollouts=rollouts, groups_per_step=2, kl_coefficient=0.1)
            train(client, problems, agents, plain, tmp_path / "cursor", steps=2, on_step=reports.append)
        else:
            fresh = async_grpo.AsyncGrpoConfig(policy=POLICY, rollouts=rollouts, groups_per_step=2, max_head_offpolicy_versions=0)
            async_grpo.train(client, problems, agents, fresh, tmp_path / "cursor", steps=2, on_step=reports.append)
        measured = measure(client.sampler(BASE), problems, agents, rollouts)
    assert len(measured.means) == 3
    for step in reports:
        assert (step.metrics["ratio/k3"], step.metrics["ratio/largest_difference"], step.metrics["failures/lost"]) == (0, 0, 0)
        assert step.metrics["agents/answers"] == 2
        assert step.metrics["gradient_norm"] > 0


def test_agents_whose_door_is_not_open_are_refused_at_once(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    agents = Agents(with_a_tool, tokenizer)
    with pytest.raises(InvalidInput, match="within `with"):
        agents.rollouts(lambda: sampler, CONFIG)
    with agents:
        assert agents.rollouts(lambda: sampler, CONFIG).group(7, PROBLEM).failures == ()
    with pytest.raises(InvalidInput, match="within `with"):
        agents.rollouts(lambda: sampler, CONFIG)


@pytest.mark.parametrize("timeout_s", [0.0, math.inf, math.nan])
def test_a_time_that_no_agent_can_have_is_refused_at_once(tokenizer: ChatTokenizer, timeout_s: float) -> None:
    with pytest.raises(InvalidInput, match=r"`timeout_s` is .* s: it must be above 0"):
        Agents(lambda _: 1.0, tokenizer, timeout_s=timeout_s)


def test_pieces_of_an_answer_are_refused_for_agents(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    with pytest.raises(InvalidInput) as refused:
        group_of(with_a_tool, tokenizer, sampler, RolloutConfig(piece_tokens=2))
    assert refused.value.field == "piece_tokens"


def test_one_failure_in_a_group_changes_nothing_of_the_others(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    def shaky(episode: Episode) -> float:
        return math.nan if episode.rollout_id.endswith(".0") else with_a_tool(episode)

    whole, less = group_of(with_a_tool, tokenizer, sampler), group_of(shaky, tokenizer, sampler)
    assert less.members == whole.members[1:]
    assert isinstance(less.members[0], Graded)
    assert isinstance(less.failures[0], Failure)


def test_a_url_with_the_key_within_opens_the_rollout_whatever_key_is_sent(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    def agent(episode: Episode) -> None:
        with openai.OpenAI(base_url=episode.keyed_url, api_key="a key of my own") as model:
            model.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": "Say a word."}])
        httpx.post(f"{episode.keyed_url}/reward", json={"reward": 0.5, "rollout_id": episode.attempt_id}).raise_for_status()
        assert httpx.post(f"{episode.keyed_url}/else", json={}).status_code == 404
        assert httpx.post(episode.keyed_url.replace(episode.api_key, "guessed") + "/reward", json={"reward": 1.0}).status_code == 401

    assert [member.reward for member in group_of(agent, tokenizer, sampler).members] == [0.5, 0.5]


def test_an_attempt_has_an_id_of_its_own_and_knows_its_time(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    seen: list[Episode] = []

    def agent(episode: Episode) -> float:
        once(episode)
        seen.append(episode)
        if len(seen) <= 2:
            raise OSError("the tool is busy")
        return 1.0

    group_of(agent, tokenizer, sampler, RolloutConfig(group_size=2, max_tokens=6, attempts=2), timeout_s=33.0)
    assert len({episode.attempt_id for episode in seen}) == len(seen) == 4
    assert all(episode.attempt_id.startswith(f"{episode.rollout_id}-") and episode.timeout_s == 33 for episode in seen)


def test_an_agent_may_read_the_longest_conversation_that_it_had(tokenizer: ChatTokenizer, sampler: Sampler) -> None:
    def agent(episode: Episode) -> float:
        assert episode.conversation() == []
        messages: list[Any] = [{"role": "user", "content": "Say red."}]
        with asks(episode) as model:
            first = model.chat.completions.create(model=episode.model, messages=messages).choices[0].message.content
            messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Say blue."}]
            second = model.chat.completions.create(model=episode.model, messages=messages).choices[0].message.content
        once(episode)
        heard = episode.conversation()
        assert heard[:3] == messages
        assert (heard[3]["role"], heard[3]["content"], len(heard)) == ("assistant", second, 4)
        return 1.0

    assert group_of(agent, tokenizer, sampler).failures == ()
