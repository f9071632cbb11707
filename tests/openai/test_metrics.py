"""`/metrics` as Prometheus reads it: names and meanings that people know from vLLM."""

import json
from pathlib import Path
from queue import SimpleQueue

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from bloomery.config import EngineConfig, ModelConfig
from bloomery.engine import executor
from bloomery.engine.executor import Command, Connected, Executor, Inbox, Stop
from bloomery.engine.hosted import CheckpointAfter
from bloomery.infer.plan import Limits
from bloomery.models import tiny
from bloomery.types.arrays import Array
from bloomery.types.generation import Generate, Priority, SamplingParams, Weights
from bloomery.types.protocol import EngineStatus, FromEngine
from bloomery.types.serving import QUEUE_BOUNDS_S, QueueTimes
from tests.engine.test_plain import restored_threads
from tests.live import LiveServer, wait_until
from tests.openai.server import Script, ScriptedServer
from tests.openai.test_contract import USER, chat
from tests.openai.test_rates import limited

DOCS = Path(__file__).parent.parent.parent / "docs"
NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions",
    "vllm:request_queue_time_seconds",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:request_success",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "bloomery:engine_up",
    "bloomery:requests_refused",
    "bloomery:draft_tokens",
    "bloomery:draft_tokens_kept",
    "bloomery:queued_operations",
    "bloomery:trained_tokens",
}


def test_metrics_are_those_that_people_know_from_vllm(server: ScriptedServer, sdk: OpenAI) -> None:
    before = metrics(server)
    server.scripted.found_tokens = 5
    answer = chat(sdk, n=2, stop=["36"])
    chat(sdk, max_tokens=2)
    wait_until(lambda: metrics(server)["vllm:request_success_total", "length"] > before["vllm:request_success_total", "length"])
    after = metrics(server)

    def grew(name: str, label: str = "tiny") -> float:
        return after[name, label] - before[name, label]

    assert grew("vllm:prompt_tokens_total") == 2 * answer.usage.prompt_tokens
    assert grew("vllm:prefix_cache_queries_total") == 2 * answer.usage.prompt_tokens
    assert grew("vllm:prefix_cache_hits_total") == 2 * server.scripted.found_tokens
    assert grew("vllm:generation_tokens_total") >= answer.usage.completion_tokens + 2
    assert (grew("vllm:request_success_total", "stop"), grew("vllm:request_success_total", "length")) == (2, 1)
    assert grew("vllm:time_to_first_token_seconds_count") == 3
    assert grew("vllm:inter_token_latency_seconds_count") == grew("vllm:generation_tokens_total") - 3
    assert grew("vllm:e2e_request_latency_seconds_count") == 3
    assert after["bloomery:engine_up", "tiny"] == 1


def test_what_an_engine_says_of_itself_is_there_to_be_read(server: ScriptedServer) -> None:
    status = EngineStatus(
        running_sequences=3,
        waiting_sequences=4,
        queued_operations=5,
        tokens_sampled=6,
        tokens_trained=7,
        cache_usage=0.25,
        preemptions=8,
        queue_times=QueueTimes(counts=(2, 3, *[0] * (len(QUEUE_BOUNDS_S) - 2), 1), seconds=500.5),
    )
    wait_until_said(server, status, 3, 4, 0.25, 8)
    found = metrics(server)
    assert (found["bloomery:queued_operations", "tiny"], found["bloomery:trained_tokens_total", "tiny"]) == (5, 7)
    queued = "vllm:request_queue_time_seconds"
    assert (found[f"{queued}_count", "tiny"], found[f"{queued}_sum", "tiny"]) == (6, 500.5)
    assert f'{queued}_bucket{{engine="engine",le="0.005",model_name="tiny"}} 5.0' in server.http.get("/metrics").text


def wait_until_said(server: ScriptedServer, status: EngineStatus, *figures: float) -> None:
    """Have the engine say it, and wait until these are samples that run and wait, the share of the cache and those who had to leave it."""

    async def say() -> None:
        server.engine._post(status)

    server.call(say())
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
    wait_until(lambda: tuple(metrics(server).get((f"vllm:{name}", "tiny")) for name in names) == figures)


@pytest.mark.slow
def test_what_an_executor_says_of_its_sampler_in_a_crowd_is_there_to_be_read(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "STATUS_S", 0.0)
    quiet, crowded, squeezed, *_ = said_of(tmp_path, crowd("rollout", 70), crowd("production", 40))
    places = Limits().slots
    assert (quiet.running_sequences, quiet.waiting_sequences, quiet.tokens_sampled) == (0, 0, 0)
    assert (quiet.cache_usage, quiet.preemptions, quiet.waiting_by_priority) == (0, 0, {})
    assert (crowded.running_sequences, crowded.waiting_sequences, crowded.tokens_sampled) == (places, 6, places)
    assert 0 < crowded.cache_usage < 1
    assert (crowded.preemptions, crowded.waiting_by_priority) == (0, {"rollout": 6})
    assert (squeezed.running_sequences, squeezed.waiting_sequences, squeezed.tokens_sampled) == (places, 46, 2 * places)
    assert (squeezed.preemptions, squeezed.waiting_by_priority) == (40, {"rollout": 46})
    # Of those who lost their places nobody gets a first one again.
    assert [sum(said.queue_times.counts) for said in (quiet, crowded, squeezed)] == [0, places, places + 40]
    assert 0 < crowded.queue_times.seconds < squeezed.queue_times.seconds
    wait_until_said(server, squeezed, places, 46, squeezed.cache_usage, 40)
    assert server.http.get("/api/v1/status").json()["engines"][0]["detail"]["waiting_by_priority"] == {"rollout": 46}


def crowd(priority: Priority, samples: int) -> Generate:
    prompt = Array.of(np.arange(20, dtype=np.int32))
    params = SamplingParams(max_tokens=40, seed=1)
    return Generate(request_id=priority, weights=Weights(version="b"), prompt=prompt, params=params, num_samples=samples, priority=priority)


def said_of(directory: Path, *requests: Generate) -> list[EngineStatus]:
    """What a replica of the shipped model says of itself when somebody connects, and behind the first step of each request."""
    model = ModelConfig(alias="tiny", path=str(tiny.PATH), base_hash="b", dtype="float32", threads=1, socket="")
    inbox: Inbox = SimpleQueue()
    orders: list[Command] = [*requests, Stop()]
    said: list[EngineStatus] = []

    def deliver(_: int, message: FromEngine) -> None:
        if isinstance(message, EngineStatus):
            said.append(message)
            if orders:
                inbox.put(orders.pop(0))

    inbox.put(Connected(1))
    with restored_threads():
        Executor(EngineConfig(data_dir=str(directory), model=model, role="replica"), inbox, deliver, CheckpointAfter()).run()
    return said


def test_a_sample_that_failed_is_told_from_one_that_nobody_waited_for(server: ScriptedServer, sdk: OpenAI) -> None:
    before = metrics(server)
    server.scripted.script = Script(fail_after=2)
    with pytest.raises(openai.InternalServerError, match="the weights melted"):
        chat(sdk, n=2)
    with pytest.raises(openai.APIError, match="the weights melted"):
        list(chat(sdk, stream=True))
    server.scripted.script = Script(refuses="grammar")
    with pytest.raises(openai.BadRequestError, match="`grammar` is too much"):
        chat(sdk)
    server.scripted.script = Script(stall_after=2)
    with server.asking("/v1/chat/completions", {"model": "tiny", "messages": USER}):
        pass
    names = ("error", "abort", "stop", "length")

    def grew() -> tuple[float, ...]:
        after = metrics(server)
        return tuple(after["vllm:request_success_total", name] - before["vllm:request_success_total", name] for name in names)

    wait_until(lambda: sum(grew()) == 5)
    assert grew() == (4, 1, 0, 0)


def metrics(server: ScriptedServer) -> dict[tuple[str, str], float]:
    """Values by name and the label that tells most."""
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            label = sample.labels.get("finished_reason") or sample.labels.get("reason") or sample.labels.get("model_name", "")
            found[sample.name, label] = sample.value
    return found


def test_metrics_need_a_key_that_may_read(server: ScriptedServer) -> None:
    assert server.http.get("/metrics", headers={"x-api-key": "tml-wrong"}).status_code == 401
    with limited(server) as sdk:
        answer = server.http.get("/metrics", headers={"x-api-key": sdk.api_key})
    assert (answer.status_code, json.loads(answer.text)["error"]["code"]) == (403, "forbidden")


def test_a_real_engine_is_measured_and_the_docs_name_every_figure(live_server: LiveServer) -> None:
    with OpenAI(base_url=f"{live_server.url}/v1", api_key=live_server.key, max_retries=0) as sdk:
        sdk.completions.create(model="bloomery-tiny", prompt="The csv module", max_tokens=8)

    def families() -> dict[str, float]:
        text = httpx.get(f"{live_server.url}/metrics", headers={"x-api-key": live_server.key}).text
        return {family.name: sum(sample.value for sample in family.samples) for family in text_string_to_metric_families(text)}

    wait_until(lambda: families().keys() >= NAMES)
    found = families()
    assert {name for name in found if name.startswith(("vllm:", "bloomery:")) and not name.endswith("_created")} == NAMES
    assert found["vllm:generation_tokens"] > 0
    assert found["bloomery:engine_up"] >= 1
    page = (DOCS / "serving.md").read_text()
    assert [name for name in sorted(NAMES) if f"`{name}" not in page] == []
