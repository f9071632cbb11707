"""An engine without a model, behind the same protocol: tokens are a hash of its weights, and a script says what goes wrong and what takes long."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import torch
from blake3 import blake3
from msgspec import Struct, structs
from numpy.typing import NDArray
from torch import Tensor

from bloomery.infer.engine import EngineEvent, Patch, Update
from bloomery.models.tensor_bytes import values
from bloomery.types.arrays import Array
from bloomery.types.errors import Conflict, Corrupt, InvalidInput, NotFound, NotSupported, Unavailable, WorkerError
from bloomery.types.generation import (
    NO_LOGPROB,
    Abort,
    FinishReason,
    Generate,
    Live,
    PromptFound,
    PromptScored,
    SampledToken,
    SampleFinished,
    Weights,
)
from bloomery.types.serving import MODEL, Capabilities, EngineMetrics, KvPolicy, PauseMode, WeightInfo

VOCAB = 300
CONTEXT = 1024
HEEDED = {"request_id", "weights", "prompt", "params", "num_samples", "priority", "max_tokens", "seed", "temperature"}
"""Of a request; `priority` and `temperature` have nothing to change here."""
Numbers = Mapping[str, Tensor]


@dataclass
class Script:
    """What befalls requests, by their id: an error after so many tokens, or a stop after some until `released`. And what befalls versions."""

    fails_after: dict[str, int] = field(default_factory=dict)
    stops_after: dict[str, int] = field(default_factory=dict)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    late: set[str] = field(default_factory=set)
    """Who swaps to one of these hears that it takes too long, and it is served when `released`."""
    corrupt: set[str] = field(default_factory=set)
    """Updates that are not what was given."""


@dataclass
class Run:
    request: Generate
    version: str
    name: str | None
    """What it follows."""
    open: set[int]
    tokens: int = 0
    aborted: set[int] = field(default_factory=set)


class HashEngine:
    """Serves `base` and what `disk` holds; a version of the disk that is None is damaged, and `wholes` are models, not adapters."""

    def __init__(
        self,
        base: Numbers,
        disk: Mapping[str, Numbers | None],
        script: Script | None = None,
        wholes: Set[str] = frozenset(),
        *,
        kv_policies: tuple[KvPolicy, ...] = get_args(KvPolicy),
        max_adapters: int | None = None,
        in_memory: int | None = None,
    ) -> None:
        """`in_memory`: so many versions of the disk at a time; None: all of them."""
        self._given: dict[str, Numbers] = {"base": base}
        """Versions that no disk holds."""
        self._loaded: dict[str, None] = {}
        """Those of the disk that are in memory, what was asked for last behind the others."""
        self._disk, self._script, self._wholes = disk, script or Script(), {"base", *wholes}
        self._kv_policies, self._max_adapters, self._in_memory = kv_policies, max_adapters, len(disk) if in_memory is None else in_memory
        self._names = {MODEL: "base"}
        self._staged: dict[str, tuple[str, dict[str, Tensor]]] = {}
        self._named = {"base"}
        """Versions that an update was begun for; none is given twice."""
        self._runs: dict[str, Run] = {}
        self._swaps_to_come: list[asyncio.Task[WeightInfo]] = []
        self._prefixes: set[tuple[str, bytes]] = set()
        self._open, self._moving = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._moving.set()
        self._paused: PauseMode | None = None
        self._asleep = False
        self._sampled = self._prefilled = self._swaps = 0

    async def generate(self, request: Generate) -> AsyncGenerator[EngineEvent, None]:
        if request.request_id in self._runs:
            raise Conflict(f"request `{request.request_id}` is being served already: choose a fresh id")
        if request.params.temperature < 0 or request.prompt.shape[0] >= CONTEXT:
            raise InvalidInput("`temperature` or the prompt is impossible")
        _refuse_unheeded(request)
        _refuse_unheeded(request.params)
        await self._open.wait()
        name = request.weights.name if isinstance(request.weights, Live) else None
        version = request.weights.version if isinstance(request.weights, Weights) else self._served(request.weights.name)
        await self._have(version)
        run = self._runs[request.request_id] = Run(request, version, name, set(range(request.num_samples)))
        try:
            for event in self._prefill(run):
                yield event
            while run.open:
                await self._turn(run)
                for event in list(self._step(run)):
                    yield event
        finally:
            del self._runs[request.request_id]

    async def score(self, prompt: list[int], weights: Weights | Live, *, top_k: int = 0) -> PromptScored:
        version = weights.version if isinstance(weights, Weights) else self._served(weights.name)
        await self._have(version)
        table = np.array([self._logprobs(version, position) for position in range(1, len(prompt))], np.float32).reshape(-1, VOCAB)
        order = np.argsort(-table, axis=1, kind="stable")[:, :top_k]
        logprobs = np.array([np.nan, *table[range(len(prompt) - 1), prompt[1:]]], np.float32)
        ids = np.concatenate([np.zeros((1, top_k)), order]).astype(np.int32)
        values = np.concatenate([np.full((1, top_k), NO_LOGPROB), np.take_along_axis(table, order, 1)]).astype(np.float32)
        top = {"top_ids": Array.of(ids), "top_logprobs": Array.of(values)} if top_k else {}
        return PromptScored(request_id="score", logprobs=Array.of(logprobs), **top)

    async def abort(self, abort: Abort) -> None:
        if (run := self._runs.get(abort.request_id)) is not None:
            run.aborted |= run.open if abort.sample is None else {abort.sample}

    async def pause(self, mode: PauseMode) -> None:
        self._refuse_asleep()
        self._open.clear()
        self._paused = mode
        if mode == "keep":
            self._moving.clear()
        if mode == "abort":
            for run in self._runs.values():
                run.aborted |= run.open
        while mode == "drain" and self._runs:
            if self._paused in (None, "keep"):
                raise Conflict("the engine was resumed, or paused with `keep`, before it had drained")
            await asyncio.sleep(0)

    async def resume(self) -> None:
        self._refuse_asleep()
        self._paused = None
        self._open.set()
        self._moving.set()

    async def begin_update(self, name: str, version: str) -> None:
        if name in self._staged:
            raise Conflict(f"an update of `{name}` is staged already: commit or cancel it")
        if version in self._named | self._loaded.keys():
            raise Conflict(f"version `{version}` names other weights already")
        numbers = self._numbers(self._served(name))
        self._named.add(version)
        self._staged[name] = version, {key: tensor.clone() for key, tensor in numbers.items()}

    async def apply(self, name: str, update: Mapping[str, Update]) -> None:
        _, numbers = self._staging(name)
        for key, change in update.items():
            if key not in numbers or tuple(change.shape) != tuple(numbers[key].shape):
                raise InvalidInput(f"tensor `{key}` does not fit")
            if isinstance(change, Patch) and any(change.indices >= numbers[key].numel()):
                raise InvalidInput(f"the patch of `{key}` names a place outside")
        for key, change in update.items():
            if isinstance(change, Patch):
                numbers[key].view(-1)[change.indices.long()] = change.values
            else:
                numbers[key] = change.clone()

    async def commit(self, name: str, policy: KvPolicy) -> WeightInfo:
        version, numbers = self._staging(name)
        if version in self._script.corrupt:
            raise Corrupt(f"version {version} is not what was given")
        self._refuse_policy(policy)
        self._given[version] = numbers
        del self._staged[name]
        return await self._swap(name, version, policy)

    async def cancel_update(self, name: str) -> None:
        self._staging(name)
        del self._staged[name]

    async def switch(self, name: str, weights: Weights, policy: KvPolicy) -> WeightInfo:
        self._served(name)
        self._refuse_policy(policy)
        return await self._swap(name, await self._read_as(name, weights), policy)

    async def weight_info(self, name: str) -> WeightInfo:
        version = self._served(name)
        return WeightInfo(name, version, _checksum(self._numbers(version)))

    async def load_adapter(self, name: str, weights: Weights) -> None:
        if name in self._names:
            raise Conflict(f"`{name}` is served already")
        if len(await self.adapters()) == self._max_adapters:
            raise NotSupported(f"`name`: {self._max_adapters} adapters are loaded, as many as there may be: unload one first", field="name")
        self._names[name] = await self._read_as(name, weights)

    async def unload_adapter(self, name: str) -> None:
        if name == MODEL:
            raise NotSupported(f"`{MODEL}` is the engine's own model: only adapters are unloaded")
        self._served(name)
        del self._names[name]
        self._staged.pop(name, None)
        for run in self._runs.values():
            run.name = None if run.name == name else run.name

    async def adapters(self) -> dict[str, str]:
        return {name: version for name, version in self._names.items() if name != MODEL}

    async def reset_prefix_cache(self) -> None:
        self._prefixes.clear()

    async def sleep(self) -> None:
        self._refuse_asleep()
        if self._runs:
            raise Conflict("requests are in hand: pause with `drain` or `abort` first")
        self._prefixes.clear()
        self._loaded.clear()
        self._asleep = True
        self._open.clear()

    async def wake(self) -> None:
        if not self._asleep:
            raise Conflict("the engine is not asleep")
        self._asleep = False
        if self._paused is None:
            self._open.set()

    def capabilities(self) -> Capabilities:
        return Capabilities(
            bit_exact=True,
            router_capture=False,
            delta_update=True,
            update_while_serving=True,
            kv_policies=self._kv_policies,
            pinned_versions=True,
            max_adapters=self._max_adapters,
            max_adapters_in_memory=self._in_memory,
        )

    async def metrics(self) -> EngineMetrics:
        return EngineMetrics(
            running_sequences=sum(len(run.open) for run in self._runs.values()),
            waiting_sequences=0,
            tokens_sampled=self._sampled,
            tokens_prefilled=self._prefilled,
            cache_usage=0.0,
            preemptions=0,
            versions_in_memory=len(self._loaded) + len(self._given) - 1,
            version_bytes=sum(tensor.nbytes for version in self._loaded for tensor in self._numbers(version).values()),
            swaps=self._swaps,
            paused=self._paused,
            asleep=self._asleep,
        )

    async def _turn(self, run: Run) -> None:
        """Wait until the run may go on, as the script has it."""
        await asyncio.sleep(0)
        await self._moving.wait()
        if self._script.stops_after.get(run.request.request_id) == run.tokens:
            await self._script.released.wait()
        if self._script.fails_after.get(run.request.request_id) == run.tokens:
            raise WorkerError("the engine broke")

    def _prefill(self, run: Run) -> Iterator[EngineEvent]:
        found = run.request.prompt.shape[0] - 1 if (run.version, run.request.prompt.data) in self._prefixes else 0
        self._prefilled += run.request.prompt.shape[0] - found
        if found:
            yield PromptFound(request_id=run.request.request_id, tokens=found)

    def _step(self, run: Run) -> Iterator[EngineEvent]:
        for sample in sorted(run.open & run.aborted):
            yield self._finish(run, sample, "abort")
        version = run.version if run.name is None else self._names[run.name]
        news = version if run.tokens == 0 or version != run.version else None
        run.version = version
        for sample in sorted(run.open):
            self._sampled += 1
            token = self._token(run, sample)
            logprob = self._logprobs(version, run.request.prompt.shape[0] + run.tokens)[token]
            yield SampledToken(
                request_id=run.request.request_id, sample=sample, position=run.tokens, token=token, logprob=float(logprob), version=news
            )
            if run.tokens + 1 == run.request.params.max_tokens:
                yield self._finish(run, sample, "length")
        run.tokens += 1

    def _finish(self, run: Run, sample: int, reason: FinishReason) -> SampleFinished:
        run.open.discard(sample)
        self._prefixes.add((run.version, run.request.prompt.data))
        return SampleFinished(request_id=run.request.request_id, sample=sample, reason=reason)

    def _token(self, run: Run, sample: int) -> int:
        what = f"{_checksum(self._numbers(run.version))} {run.request.prompt.data!r} {run.request.params.seed} {sample} {run.tokens}"
        return int.from_bytes(blake3(what.encode()).digest()[:4]) % VOCAB

    def _logprobs(self, version: str, position: int) -> NDArray[np.float32]:
        """Of every token at this place of any sequence; they are of no distribution."""
        data = blake3(f"{_checksum(self._numbers(version))} {position}".encode()).digest(VOCAB)
        return -1 - np.frombuffer(data, np.uint8).astype(np.float32) / 256

    def _numbers(self, version: str) -> Numbers:
        found = self._given.get(version) or self._disk.get(version)
        if found is None:
            raise WorkerError(f"cannot load weights {version}: damaged")
        return found

    async def _have(self, version: str) -> None:
        """In memory, where what was asked for longest ago makes room unless somebody runs with it; while all of it is in use this waits."""
        self._numbers(version)
        if version in self._given:
            return
        self._loaded.pop(version, None)
        while len(self._loaded) >= self._in_memory:
            used = {run.version for run in self._runs.values()}
            idle = next((other for other in self._loaded if other not in used), None)
            if idle is None:
                await asyncio.sleep(0)
            else:
                del self._loaded[idle]
        self._loaded[version] = None

    async def _read_as(self, name: str, weights: Weights) -> str:
        version = weights.version
        await self._have(version)
        if (version in self._wholes) != (name == MODEL):
            raise InvalidInput(f"version {version} is {'a whole model' if name != MODEL else 'an adapter'}, which `{name}` is not", field="weights")
        return version

    def _served(self, name: str) -> str:
        if name not in self._names:
            raise NotFound(f"nothing is served as `{name}`")
        return self._names[name]

    def _staging(self, name: str) -> tuple[str, dict[str, Tensor]]:
        if name not in self._staged:
            raise Conflict(f"no update of `{name}` is staged: begin one")
        return self._staged[name]

    async def _swap(self, name: str, version: str, policy: KvPolicy) -> WeightInfo:
        """In the order in which they were asked for."""
        swap = asyncio.create_task(self._swap_when_due(name, version, policy, [*self._swaps_to_come]))
        self._swaps_to_come.append(swap)
        if version in self._script.late and not self._script.released.is_set():
            raise Unavailable(f"waited too long for version {version}")
        return await swap

    async def _swap_when_due(self, name: str, version: str, policy: KvPolicy, before: list[asyncio.Task[WeightInfo]]) -> WeightInfo:
        await asyncio.gather(*before)
        if version in self._script.late:
            await self._script.released.wait()
        self._names[name] = version
        self._swaps += 1
        if policy == "flush":
            self._prefixes.clear()
        return WeightInfo(name, version, _checksum(self._numbers(version)))

    def _refuse_policy(self, policy: KvPolicy) -> None:
        if policy not in self._kv_policies:
            raise NotSupported(f"`policy`: `{policy}` is none of this engine's, which are {', '.join(self._kv_policies)}", field="policy")

    def _refuse_asleep(self) -> None:
        if self._asleep:
            raise Conflict("the engine is asleep: wake it first")


def _refuse_unheeded(asked: Struct) -> None:
    for each in structs.fields(asked):
        if each.name not in HEEDED and getattr(asked, each.name) != each.default:
            raise NotSupported(f"`{each.name}` means nothing to tokens that are a hash: leave it out", field=each.name)


def _checksum(numbers: Numbers) -> str:
    return blake3(b"".join(bytes(values(tensor)) for _, tensor in sorted(numbers.items()))).hexdigest()[:32]


def numbers(seed: int) -> dict[str, Tensor]:
    """Weights of a fake engine."""
    return {"w": torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))}
