"""The executor: one thread that owns all tensors and divides its time between sampling and training.

It takes commands from an inbox, gives training a turn (`runs.py`, `training.py`), and then does as many sampling steps as take about as long. A
replica has no runs and only samples. With nothing to do it sleeps until a command arrives or a status is due. It never waits for the socket:
`deliver` hands messages to the event loop.
"""

import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

import torch

from bloomery.config import EngineConfig
from bloomery.config.data_dir import DataDir
from bloomery.engine.comparison import Comparisons
from bloomery.engine.doubtful import Doubtful
from bloomery.engine.hosted import CheckpointAfter
from bloomery.engine.proving import prove_base, proved
from bloomery.engine.runs import HeldRuns, NoRuns, ProcessRuns
from bloomery.engine.shelf import BlobShelf
from bloomery.engine.step_threads import StepThreads
from bloomery.infer.grammar import Grammars
from bloomery.infer.probe import Probation
from bloomery.infer.probe_prompt import ask_probe
from bloomery.infer.sampler import Sampler
from bloomery.infer.scrub import Scrub
from bloomery.infer.versions import Model
from bloomery.models.families import read_config
from bloomery.models.form import Form, plain_form
from bloomery.models.kernel_probe import probe
from bloomery.models.load import load_decoder
from bloomery.models.numerics import numerics_id, sampling_id
from bloomery.models.threads import compute_with
from bloomery.obs.failpoints import failpoint
from bloomery.store.blobs import Blobs
from bloomery.sync.chain.keys import read_keys
from bloomery.sync.tokenizer import tokenizer_hash
from bloomery.train.full import count_parts
from bloomery.types.errors import BloomeryError, Corrupt, WorkerError, reason
from bloomery.types.generation import Abort, Generate, SamplerEvent
from bloomery.types.ids import new_id
from bloomery.types.kept import together
from bloomery.types.protocol import (
    Acknowledge,
    BaseInfo,
    CloseRun,
    Compare,
    Drain,
    Drained,
    EngineStatus,
    Execute,
    FromEngine,
    OpenRun,
    SamplerEvents,
    Stage,
    Staged,
    ToEngine,
    Welcome,
)

log = logging.getLogger(__name__)

STATUS_S: Final = 1.0
HEARTBEAT_S: Final = 15.0
"""An idle engine is silent for no longer."""
LONGEST_SLICE_S: Final = 0.1
"""Sampling gets as much time as the last pass took, but not more at a time."""


class Connected(NamedTuple):
    """A conversation began; messages to it carry its number."""

    conversation: int


class Disconnected(NamedTuple):
    """A conversation ended."""

    conversation: int


class Stop(NamedTuple):
    """Checkpoint and end."""


Command = ToEngine | Connected | Disconnected | Stop
Inbox = SimpleQueue[Command]
Deliver = Callable[[int, FromEngine], None]


class Executor:
    """All state that is made of tensors, and the loop that works on it. Lives on one thread from its construction on."""

    def __init__(self, config: EngineConfig, inbox: Inbox, deliver: Deliver, checkpoint_after: CheckpointAfter) -> None:
        compute_with(config.model.threads)
        self._config, self._inbox, self._deliver = config, inbox, deliver
        self._replica = config.role == "replica"
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        path = Path(config.model.path)
        grammars = Grammars(path, read_config(path).vocab_size)
        # Beside the weights and before anybody is served: for seconds, with a large vocabulary, it holds up every thread of the process.
        prepared = grammars.prepare()
        self._decoder = load_decoder(path, dtype=self._dtype, device=config.model.device)
        self._numerics, self._probe = numerics_id(self._dtype, config.model.device), probe(self._decoder)
        shelf = self._shelf(path)
        self._runs: ProcessRuns = NoRuns(self._send)
        if not self._replica:
            self._runs = HeldRuns(config, self._decoder, shelf, self._send, checkpoint_after)
        form = plain_form(self._decoder) if config.plain else self._probe.form
        # Before the sampler of a replica changes the form of its weights.
        self._base = self._base_info()
        self._threads = StepThreads(config.model.threads, one_thread=form.one_thread)
        self._sampler = Sampler(self._decoder, shelf, grammars=grammars, form=form, alone=self._replica)
        if self._replica:
            # Where plain matrices do not stay, a proof of them would show nothing that the proof of the packed ones does not.
            shelf.kept_as = self._sampler.computed_with
        self._prove(path, shelf, form)
        self._doubtful = Doubtful()
        self._comparisons = Comparisons(shelf, self._decoder, form, self._send, self._sampler.shrink_cache)
        self._boot_id = new_id("boot")
        self._conversation: int | None = None
        self._paused = self._draining = self._stopping = False
        self._slice_s = 0.0
        self._stirred, self._told_at_s = False, 0.0
        wait([prepared])
        log.info("holds %s: %d parameters, numerics %s", config.model.base_hash, self._base.parameters, self._numerics)
        log.info("proved: root %s in %.2f s, probe prompt within %.3g nats", self._proved.root, self._proved.seconds, self._proved.probe_max_abs)
        for failure in self._probe.failures:
            log.warning("not bit-exact here: %s", failure)

    def _shelf(self, path: Path) -> BlobShelf:
        data, model = DataDir(Path(self._config.data_dir)), self._config.model
        return BlobShelf(
            Blobs(data.blobs),
            self._decoder,
            base_hash=model.base_hash,
            numerics=self._numerics,
            tokenizer_hash=tokenizer_hash(path),
            keys=read_keys(data.chain_key),
        )

    def _prove(self, path: Path, shelf: BlobShelf, form: Form) -> None:
        """That the base is in memory as its files have it, and that the sampler answers as the trainer would: it tells whether bits are promised."""
        known, model = shelf.base(path), self._config.model
        proofs = prove_base(known, self._sampler, self._decoder, trains=not self._replica)
        if not self._replica:
            shelf.leave_base(known)
        self._bit_exact = self._probe.bit_exact and not self._config.plain
        base = Model(model.base_hash, self._decoder, None)
        probed = ask_probe(self._sampler, base, exact=self._bit_exact)
        self._bit_exact &= probed.bit_equal
        any_threads = shelf.one_thread = self._bit_exact and self._probe.form.one_thread
        self._sampling_numerics = shelf.probe_numerics = sampling_id(self._dtype, model.device, any_threads=any_threads)
        self._sampler.versions.examine_with(self._probation(shelf, base, form).examine)
        self._proved, self._scrub, self._probe_tokens = proved(proofs, probed), Scrub(proofs, self._sampler), self._sampler.tokens_sampled
        self._sampler.forget_queue_times()

    def _probation(self, shelf: BlobShelf, base: Model, form: Form) -> Probation:
        """What versions are held against: the trainer's side of the base is computed by its engine, and left for replicas."""
        told = shelf.told(shelf.base_name) if self._replica else None
        found = Probation(base, form, self._sampler.computed_with, exact=self._bit_exact, numerics=self._sampling_numerics, told=told)
        if not self._replica:
            shelf.leave_told(found.answer(shelf.base_name))
        return found

    def run(self) -> None:
        """Work until `Stop`, then checkpoint every run."""
        while not self._stopping:
            self._take_commands()
            self._sample()
            self._train()
            if not (self._paused or self._draining):
                self._comparisons.take_turn()
            self._tidy()
            self._look_at_weights()
            self._finish_draining()
            self._tell_status()
        self._runs.checkpoint_all()
        self._runs.close()

    def _take_commands(self) -> None:
        """Everything that has arrived; waits while there is nothing to do."""
        works = self._has_work()
        turns_s = self._sampler.tidy_in_s, math.inf if self._paused else self._runs.next_turn_in_s
        patience_s = 0.0 if works else min(self._next_status_s(), self._scrub.due_in_s, *turns_s)
        self._stirred |= works
        try:
            self._obey(self._inbox.get(timeout=patience_s) if patience_s > 0 else self._inbox.get_nowait())
            while True:
                self._obey(self._inbox.get_nowait())
        except Empty:
            return

    def _has_work(self) -> bool:
        if self._draining or self._stopping:
            return True
        return not self._paused and (self._sampler.busy or self._runs.next_turn_in_s == 0 or self._comparisons.waiting > 0)

    def _obey(self, command: Command) -> None:
        self._stirred = True
        match command:
            case Connected(conversation=conversation):
                self._begin_conversation(conversation)
            case Disconnected(conversation=conversation) if conversation == self._conversation:
                self._conversation = None
                self._sampler.forget_all()
                self._comparisons.forget_all()
            case OpenRun() | Execute() | Acknowledge() | CloseRun():
                self._runs.obey(command)
            case Generate():
                self._sampler.submit(command)
            case Abort():
                self._sampler.abort(command)
            case Compare():
                self._comparisons.add(command)
            case Stage():
                self._stage(command)
            case Drain():
                self._draining = True
            case Stop():
                self._stopping = True
            case _:
                log.info("ignored %s of a conversation that ended", type(command).__name__)

    def _stage(self, order: Stage) -> None:
        """Between two steps, beside whatever is sampled; whoever asked in a conversation that ended is told nothing."""
        conversation = self._conversation

        def tell(staged: Future[Model]) -> None:
            error = staged.exception()
            code = error.code if isinstance(error, BloomeryError) else WorkerError.code
            if conversation == self._conversation:
                self._send(Staged(request_id=order.request_id, error=None if error is None else reason(error), code="" if error is None else code))

        self._sampler.stage(order.weights).add_done_callback(tell)

    def _begin_conversation(self, conversation: int) -> None:
        """Whoever connects learns where every run is, and hears again what was not acknowledged; requests of an earlier conversation are dropped."""
        self._conversation = conversation
        self._paused = self._draining = False
        self._told_at_s = 0.0
        self._sampler.forget_all()
        self._comparisons.forget_all()
        self._send(
            Welcome(
                boot_id=self._boot_id,
                pid=os.getpid(),
                base=self._base,
                numerics=self._numerics,
                sampling_numerics=self._sampling_numerics,
                bit_exact=self._bit_exact,
                runs=dict(self._runs.executed),
                role=self._config.role,
                proved=self._proved,
            )
        )
        self._runs.repeat()

    def _sample(self) -> None:
        """At least one step, and then as long as the last pass took."""
        until = time.monotonic() + self._slice_s
        while self._sampler.busy and not (self._paused or self._draining):
            try:
                events = self._step()
            except Exception as error:
                log.exception("a sampling step broke")
                self._sampler.fail_running(f"sampling broke: {type(error).__name__}: {reason(error)}")
                return
            finally:
                compute_with(self._config.model.threads)
            failpoint("engine.decode.step")
            if events:
                self._send(SamplerEvents(events=together(events)))
            if time.monotonic() >= until:
                return

    def _step(self) -> list[SamplerEvent]:
        """With as many threads as suit it; prompts, which are of any length and say nothing about other steps, with all."""
        samples, sampled = self._sampler.running_sequences, self._sampler.tokens_sampled
        if self._sampler.prefills:
            return self._sampler.step()
        threads = self._threads.choose(samples)
        compute_with(threads)
        began = time.monotonic()
        events = self._sampler.step()
        # A step without a token waited for something else.
        if self._sampler.tokens_sampled > sampled:
            self._threads.took(samples, threads, time.monotonic() - began)
        return events

    def _tidy(self) -> None:
        """Memory of the sampler that stands empty is given back after a while, or at once where it is lacking."""
        if self._runs.waits_for_memory:
            self._sampler.shrink_cache()
        self._sampler.tidy()

    def _train(self) -> None:
        began = time.monotonic()
        worked = not self._paused and self._runs.take_turn(begin=not self._draining)
        self._slice_s = min(time.monotonic() - began, LONGEST_SLICE_S) if worked else 0.0

    def _look_at_weights(self) -> None:
        try:
            self._scrub.take_turn()
        except Corrupt as error:
            raise Corrupt(f"{error.message}; {self._doubtful.advice(self._scrub.clean_s)}") from error

    def _finish_draining(self) -> None:
        """Once nothing is half done: checkpoint, say so, and rest until somebody connects."""
        if self._draining and not self._runs.begun:
            self._runs.checkpoint_all()
            self._draining, self._paused = False, True
            self._send(Drained())

    def _send(self, message: FromEngine) -> None:
        self._doubtful.note(message, self._scrub.clean_s)
        if self._conversation is not None:
            self._deliver(self._conversation, message)

    def _base_info(self) -> BaseInfo:
        config = self._decoder.config
        return BaseInfo(
            base_hash=self._config.model.base_hash,
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            context=config.context,
            parameters=sum(parameter.numel() for parameter in self._decoder.parameters()),
            dtype=self._config.model.dtype,
            parts=count_parts(self._decoder),
        )

    def _status(self) -> EngineStatus:
        return EngineStatus(
            running_sequences=self._sampler.running_sequences,
            waiting_sequences=self._sampler.waiting_sequences,
            queued_operations=self._runs.waiting,
            tokens_sampled=self._sampler.tokens_sampled - self._probe_tokens,
            tokens_trained=self._runs.tokens_trained,
            waiting_by_priority=self._sampler.waiting_by_priority,
            cache_usage=self._sampler.cache_usage,
            preemptions=self._sampler.preemptions,
            queue_times=self._sampler.queue_times,
            proved_versions=self._sampler.versions.proved,
            scrub_rounds=self._scrub.rounds,
            condemned=self._scrub.condemned,
        )

    def _next_status_s(self) -> float:
        pause_s = STATUS_S if self._stirred else HEARTBEAT_S
        return max(0.0, self._told_at_s + pause_s - time.monotonic())

    def _tell_status(self) -> None:
        if self._next_status_s() == 0.0:
            self._stirred, self._told_at_s = False, time.monotonic()
            self._send(self._status())
