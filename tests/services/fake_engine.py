"""An engine without a model, on a real unix socket: it speaks the protocol, and its state is a chain of hashes, so replays can be compared."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from blake3 import blake3

from bloomery.config import ModelConfig
from bloomery.store.blobs import Blobs
from bloomery.types import protocol
from bloomery.types.arrays import Array
from bloomery.types.errors import BloomeryError, Category, NotFound
from bloomery.types.fidelity import compare, verdict
from bloomery.types.generation import (
    NO_LOGPROB,
    Abort,
    Generate,
    GenerateFailed,
    PromptFound,
    PromptRouted,
    PromptScored,
    SampledToken,
    SampleFinished,
    SamplerEvent,
    Weights,
)
from bloomery.types.operations import (
    CheckpointResult,
    Failed,
    ForwardBackward,
    ForwardBackwardResult,
    LoadCheckpoint,
    LoadResult,
    Operation,
    OptimStep,
    OptimStepResult,
    Rejected,
    Result,
    SaveCheckpoint,
    SaveSnapshot,
    SnapshotResult,
)
from bloomery.types.protocol import (
    ALIVE_EVERY_S,
    Acknowledge,
    Alive,
    BaseInfo,
    CheckpointWritten,
    CloseRun,
    Compare,
    Compared,
    Drain,
    Drained,
    EngineStatus,
    Execute,
    FromEngine,
    OpenRun,
    OperationDone,
    Role,
    RunClosed,
    RunOpened,
    SamplerEvents,
    Stage,
    Staged,
    Welcome,
)
from bloomery.types.resources import Fidelity
from bloomery.types.wire import encode
from tests.render.builders import CHATML, byte_level, small_config, write

BASE = "base-1"
PARTS = {"attn": 10**15, "mlp": 1000, "unembed": 1000}
"""No machine has memory for all of them."""
VOCABULARY, CONTEXT = 300, 64


def fake_base(directory: Path, alias: str = "tiny") -> ModelConfig:
    """The fake's base model as an api is told of it: files without weights, and the socket `s`, both in `directory`."""
    chat = {"chat_template": CHATML, "eos_token": "<|im_end|>"}
    model = write(directory / "model", byte_level(), config=small_config(VOCABULARY, CONTEXT), tokenizer_config=chat)
    return ModelConfig(alias=alias, path=str(model), base_hash=BASE, dtype="float32", threads=1, socket=str(directory / "s"))


@dataclass
class HeldRun:
    """A run in the memory of the fake."""

    state: str
    last_seq: int
    step: int = 0
    gradients: str = ""
    spoiled: bool = False
    saved_seq: int = -1
    unacknowledged: dict[int, OperationDone] = field(default_factory=dict)


class FakeEngine:
    """`gate` holds the executor; `crash` is a death with all memory, `hang_up` only ends the connection."""

    alive_every_s = ALIVE_EVERY_S

    def __init__(self, socket: Path, blobs: Blobs, *, checkpoint_every: int = 2, numerics: str = "fake-numerics", role: Role = "engine") -> None:
        self.socket, self.blobs, self.checkpoint_every, self.numerics, self.role = socket, blobs, checkpoint_every, numerics, role
        self.sampling_numerics: str | None = None
        """Where it samples with others than it trains with."""
        self.bit_exact = True
        self.gate = asyncio.Event()
        self.gate.set()
        self._awake = asyncio.Event()
        self._awake.set()
        self.runs: dict[str, HeldRun] = {}
        self.refuse_to_open: str | None = None
        self.fails: Category | None = None
        """Whose error it is that a run cannot be opened."""
        self.stuck_at: int | None = None
        """The operation that never ends."""
        self.full = False
        """Whether its disk is, so that nothing is saved."""
        self.salt = ""
        """Changes every computed result: another machine, another library."""
        self.salted_from = 0
        """The first operation whose result it changes."""
        self.opened: list[OpenRun] = []
        self.executed: list[Execute] = []
        self.sampled: list[Generate] = []
        self.aborted: list[Abort] = []
        self.compared: list[Compare] = []
        self.refuse_to_compare: BloomeryError | None = None
        self.silent_about_comparisons = False
        self.staged: list[Weights] = []
        self.asked_to_stage = 0
        self._stagings: deque[Stage] = deque()
        self.refuse_to_stage: str | None = None
        self.silent_about_staging = False
        self.found_tokens = 0
        """Of every prompt, that were there already."""
        self.refuse_to_sample: tuple[Category, str] | None = None
        """Whose error every request is, and its code."""
        self.versions_said: dict[int, str] = {}
        """Of tokens by their position; of the others it says nothing."""
        self._queue: deque[Execute] = deque()
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self._work = asyncio.Event()
        self._executor: asyncio.Task[None] | None = None
        self._beat: asyncio.Task[None] | None = None
        self._boots = 0

    async def start(self) -> None:
        """Listen with an empty memory."""
        self._boots += 1
        self._server = await asyncio.start_unix_server(self._serve, self.socket)
        self._executor = asyncio.create_task(self._execute_queue())
        self._beat = asyncio.create_task(self._say_alive())

    async def crash(self) -> None:
        """Die: no more connection, no memory, no socket."""
        assert self._server is not None
        assert self._executor is not None
        assert self._beat is not None
        self._executor.cancel()
        self._beat.cancel()
        await asyncio.wait({self._executor, self._beat})
        self._server.close()
        self.hang_up()
        self.socket.unlink(missing_ok=True)
        self.runs, self._queue = {}, deque()

    def hang_up(self) -> None:
        """End the connection; the memory stays."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._queue.clear()

    def stand_still(self) -> None:
        """As if by SIGSTOP."""
        assert self._writer is not None
        self._awake.clear()
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def go_on(self) -> None:
        """As if by SIGCONT."""
        assert self._writer is not None
        self._awake.set()
        if not self._writer.is_closing():
            self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    def say(self, *, queued_operations: int) -> None:
        """A status."""
        self._post(EngineStatus(running_sequences=0, waiting_sequences=0, queued_operations=queued_operations, tokens_sampled=0, tokens_trained=0))

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(self.alive_every_s)
            await self._awake.wait()
            self._post(Alive())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._awake.wait()
        self.hang_up()
        self._writer = writer
        base = BaseInfo(base_hash=BASE, model_type="fake", vocab_size=VOCABULARY, context=CONTEXT, parameters=1, dtype="float32", parts=PARTS)
        held = {run_id: run.last_seq for run_id, run in self.runs.items()}
        self._post(
            Welcome(
                boot_id=f"boot-{self._boots}",
                pid=1,
                base=base,
                numerics=self.numerics,
                sampling_numerics=self.sampling_numerics or self.numerics,
                bit_exact=self.bit_exact,
                runs=held,
                role=self.role,
            )
        )
        for run in self.runs.values():
            for done in run.unacknowledged.values():
                self._post(done)
        try:
            while True:
                length = protocol.frame_length(await reader.readexactly(4))
                self._take(protocol.parse_to_engine(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def fail(self, request: Generate, message: str) -> None:
        """Say of a request that is in hand that it failed; on the loop of the fake."""
        self._post(SamplerEvents(events=(GenerateFailed(request_id=request.request_id, message=message, category="server"),)))

    def _post(self, message: FromEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(protocol.frame(message))

    def _take(self, message: protocol.ToEngine) -> None:
        match message:
            case OpenRun():
                self._open(message)
            case Execute():
                assert message.run_id in self.runs, "an operation of a run that is not open"
                self._queue.append(message)
                self._work.set()
            case Acknowledge():
                if message.run_id in self.runs:
                    self.runs[message.run_id].unacknowledged.pop(message.seq, None)
            case CloseRun():
                if message.run_id in self.runs:
                    self._save(message.run_id)
                    del self.runs[message.run_id]
                self._post(RunClosed(run_id=message.run_id))
            case Drain():
                for run_id in self.runs:
                    self._save(run_id)
                self._post(Drained())
            case Generate():
                self.sampled.append(message)
                self._sample(message)
            case Abort():
                self.aborted.append(message)
            case Compare():
                self._compare(message)
            case Stage():
                self._stagings.append(message)
                self.asked_to_stage += 1
                if not self.silent_about_staging:
                    self.answer_staging()

    def answer_staging(self) -> None:
        """Of everything that is to be staged: it is, or cannot be."""
        while self._stagings:
            order = self._stagings.popleft()
            if self.refuse_to_stage is None:
                self.staged.append(order.weights)
            self._post(Staged(request_id=order.request_id, error=self.refuse_to_stage, code="corrupt" if self.refuse_to_stage else ""))

    def _compare(self, message: Compare) -> None:
        """The trainer says of every token that it has -1.0 too."""
        self.compared.append(message)
        if self.silent_about_comparisons:
            return
        if self.refuse_to_compare is not None:
            refused = self.refuse_to_compare
            self._post(Compared(request_id=message.request_id, error=refused.message, code=refused.code))
            return
        numbers = compare(message.answers, [np.full(each.logprobs.shape, -1.0, np.float32) for each in message.answers])
        known = {name: value for name, value in numbers._asdict().items() if name != "worst"} | {"measured_us": len(self.compared)}
        card = Fidelity(
            mode=message.mode, verdict=verdict(numbers, message.mode), first_difference=None, dtype="float32", numerics=self.numerics, **known
        )
        self._post(Compared(request_id=message.request_id, card=card.model_dump_json().encode()))

    def _open(self, message: OpenRun) -> None:
        self.opened.append(message)
        run_id, error = message.spec.run_id, self.refuse_to_open
        if error is None:
            self.runs[run_id] = HeldRun(_hash("new", encode(message.spec.lora)), message.last_seq)
            if message.checkpoint is not None:
                try:
                    self._restore(self.runs[run_id], message.checkpoint)
                except NotFound as missing:
                    error = missing.message
                    del self.runs[run_id]
        self._post(RunOpened(run_id=run_id, error=error, fails=self.fails if error else None))

    async def _execute_queue(self) -> None:
        while True:
            await self._work.wait()
            while self._queue:
                await self.gate.wait()
                if self._queue and self._queue[0].seq == self.stuck_at:
                    break
                if self._queue:
                    self._execute(self._queue.popleft())
                await asyncio.sleep(0)
            self._work.clear()

    def _execute(self, message: Execute) -> None:
        run = self.runs[message.run_id]
        if message.seq <= run.last_seq:
            return
        assert message.seq == run.last_seq + 1, f"operation {message.seq} after {run.last_seq}"
        self.executed.append(message)
        result = self._perform(message, run)
        run.last_seq = message.seq
        done = OperationDone(run_id=message.run_id, seq=message.seq, result=result, seconds=0.25, replay=message.replay)
        run.unacknowledged[message.seq] = done
        self._post(done)
        due = isinstance(message.operation, OptimStep) and run.step % self.checkpoint_every == 0
        if isinstance(result, LoadResult) or (due and isinstance(result, OptimStepResult)):
            self._save(message.run_id)

    def _perform(self, message: Execute, run: HeldRun) -> Result:
        operation: Operation = message.operation
        salt = self.salt if message.seq >= self.salted_from else ""
        match operation:
            case ForwardBackward():
                mark = _hash(run.state, encode(operation), salt)
                if operation.backward:
                    run.gradients = _hash(run.gradients, mark)
                value = int(mark[:6], 16) / 1e6
                outputs = tuple({"logprobs": Array.of(np.full(datum.tokens.shape, -value, np.float32))} for datum in operation.data)
                return ForwardBackwardResult(outputs=outputs, metrics={"loss:sum": value, "weights:sum": 2.0, "tokens:sum": 4.0})
            case OptimStep():
                if run.spoiled:
                    run.spoiled, run.gradients = False, ""
                    return Failed(message="an earlier operation failed", category="user")
                run.state, run.gradients, run.step = _hash(run.state, run.gradients, encode(operation)), "", run.step + 1
                return OptimStepResult(metrics={"grad_norm": 1.0 + len(salt), "step": float(run.step)})
            case SaveCheckpoint() | SaveSnapshot() if self.full:
                return Failed(message="no space left on device", category="server")
            case SaveCheckpoint():
                size = self._write(operation.key, run)
                return CheckpointResult(key=operation.key, digest=run.state, size_bytes=size, step=run.step)
            case SaveSnapshot():
                version = _hash("version", run.state, operation.template_hash)
                key = f"snapshots/{version}.safetensors"
                return SnapshotResult(version=version, key=key, size_bytes=self._write(key, run), step=run.step)
            case LoadCheckpoint():
                try:
                    self._restore(run, operation.key)
                except NotFound as missing:
                    return Failed(message=missing.message, category="server")
                return LoadResult(digest=run.state, step=run.step)
            case Rejected():
                if operation.effect != "none":
                    run.spoiled, run.gradients = operation.effect == "spoil", ""
                return Failed(message=operation.message, category=operation.category)

    def _save(self, run_id: str) -> None:
        run = self.runs[run_id]
        if run.gradients or run.saved_seq == run.last_seq:
            return
        key = f"checkpoints/{run_id}/{run.last_seq}-auto{self._boots}.safetensors"
        self._write(key, run)
        run.saved_seq = run.last_seq
        self._post(CheckpointWritten(run_id=run_id, seq=run.last_seq, key=key, digest=run.state))

    def _write(self, key: str, run: HeldRun) -> int:
        data = json.dumps({"state": run.state, "step": run.step}).encode()
        self.blobs.put(key, data)
        return len(data)

    def _restore(self, run: HeldRun, key: str) -> None:
        saved = json.loads(self.blobs.get(key))
        run.state, run.step, run.gradients, run.spoiled = saved["state"], saved["step"], "", False

    def _sample(self, request: Generate) -> None:
        """Token n of sample s is `100 + s * 10 + n`; the last one never comes for prompts that begin with 0."""
        if self.refuse_to_sample is not None:
            category, code = self.refuse_to_sample
            failed = GenerateFailed(request_id=request.request_id, message="it cannot be served", category=category, field="prompt", code=code)
            self._post(SamplerEvents(events=(failed,)))
            return
        events: list[SamplerEvent] = []
        if self.found_tokens:
            events.append(PromptFound(request_id=request.request_id, tokens=self.found_tokens))
        if request.scores_prompt:
            events.append(_scored(request))
        events += routed(request)
        endless = request.prompt.numpy()[0] == 0
        for sample in range(request.num_samples):
            for position in range(request.params.max_tokens - endless):
                token, said = 100 + sample * 10 + position, self.versions_said.get(position)
                one = SampledToken(request_id=request.request_id, sample=sample, position=position, token=token, logprob=-1.0, version=said)
                events.append(one)
            if not endless:
                events.append(SampleFinished(request_id=request.request_id, sample=sample, reason="length"))
        self._post(EngineStatus(running_sequences=1, waiting_sequences=0, queued_operations=0, tokens_sampled=1, tokens_trained=0))
        self._post(SamplerEvents(events=tuple(events)))


def routed(request: Generate) -> list[SamplerEvent]:
    """Where the prompt went, if that is asked: to expert 0 of the only layer, whose answer is taken as it is."""
    shape = (request.prompt.shape[0] - 1, 1, 1)
    weights = Array.of(np.ones(shape, np.float32)) if request.routing_weights else None
    experts = Array.of(np.zeros(shape, np.int32))
    return [PromptRouted(request_id=request.request_id, experts=experts, expert_weights=weights)] if request.routing else []


def _scored(request: Generate) -> PromptScored:
    """Tokens of the prompt have 0; the likeliest and the drawn of position p are p, p + 1, ... with their negatives; a target t there has -t / p."""
    length, columns = request.prompt.shape[0], {}
    logprobs = np.zeros(length, np.float32)
    logprobs[: request.scored_from] = np.nan
    positions = np.arange(length)[:, None]
    if request.prompt_top_k:
        ids = positions + np.arange(request.prompt_top_k)
        unscored = positions < request.scored_from
        columns["top_ids"] = np.where(unscored, 0, ids).astype(np.int32)
        columns["top_logprobs"] = np.where(unscored, NO_LOGPROB, -ids).astype(np.float32)
    if request.targets is not None:
        columns["target_logprobs"] = (-request.targets.ids.numpy() / request.targets.positions.numpy()).astype(np.float32)
    if request.prompt_draws:
        ids = positions[1:] + np.arange(request.prompt_draws)
        columns |= {"drawn_ids": ids.astype(np.int32), "drawn_logprobs": -ids.astype(np.float32)}
    arrays = {name: Array.of(values) for name, values in columns.items()}
    return PromptScored(request_id=request.request_id, logprobs=Array.of(logprobs), **arrays)


@asynccontextmanager
async def fake_engine(socket: Path, blobs: Blobs, **options: int) -> AsyncIterator[FakeEngine]:
    """A listening engine."""
    engine = FakeEngine(socket, blobs, **options)  # type: ignore[arg-type]
    await engine.start()
    try:
        yield engine
    finally:
        await engine.crash()


def _hash(*parts: str | bytes) -> str:
    hasher = blake3()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()[:32]
