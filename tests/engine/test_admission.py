"""What an operation needs is foreseen, and what cannot fit is refused before it runs."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from bloomery.engine.admission import adapter_bytes, held_bytes, lack, operation_need, pass_bytes, shared_pass_bytes
from bloomery.engine.hosted import CheckpointAfter, HostedRun
from bloomery.engine.ledger import Ledger
from bloomery.engine.memory import Memory
from bloomery.engine.training import Training
from bloomery.train.batch import pack
from bloomery.train.lora import Lora
from bloomery.train.losses import find_loss
from bloomery.train.optim import AdamW
from bloomery.train.passes import Share
from bloomery.types.footprint import CHECKPOINT_BYTES
from bloomery.types.operations import Failed, ForwardBackwardResult, LoraSpec, OptimStepResult, SaveCheckpoint
from bloomery.types.protocol import Execute, OperationDone
from tests.train import builders
from tests.train.builders import datum, learn, step, supervised

# In a process of its own: peaks of memory never go down again.
PEAK = """
import json, sys, torch
from bench.shapes import decoder, supervised
from bloomery.models.decoder import Decoder
from bloomery.models.families import parse_config
from bloomery.engine.admission import pass_bytes
from bloomery.train import batch
from bloomery.train.lora import Lora
from bloomery.train.losses import find_loss
from bloomery.train.passes import Share, compute
from bloomery.types.operations import LoraSpec

def of_process(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) << 10

torch.set_num_threads(1)
lengths, backward = [int(length) for length in sys.argv[1].split(",")], sys.argv[2] == "backward"
loss = find_loss("cross_entropy", {})
if len(sys.argv) == 3:
    model = decoder("5M")
else:
    model = Decoder(parse_config(json.loads(sys.argv[3])), dtype=torch.float32).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
lora = Lora(model, LoraSpec(rank=8, seed=1))
compute([Share(lora, batch.pack(supervised(4096, [8], 0), loss), loss, backward)])
data = supervised(4096, lengths, 0)
share = Share(lora, batch.pack(data, loss), loss, backward)
open("/proc/self/clear_refs", "w").write("5")
before = of_process("VmRSS")
compute([share])
print(of_process("VmHWM") - before, pass_bytes(data, model.config, torch.float32, exact=not backward, backward=backward))
"""


SHARED_PEAK = """
import sys, torch
from bench.shapes import decoder, supervised
from bloomery.engine.admission import shared_pass_bytes
from bloomery.train import batch
from bloomery.train.lora import Lora
from bloomery.train.losses import find_loss
from bloomery.train.passes import Share, compute
from bloomery.types.operations import LoraSpec

def of_process(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) << 10

torch.set_num_threads(1)
lengths, backward = [int(length) for length in sys.argv[1].split(",")], sys.argv[2] == "backward"
loss = find_loss("cross_entropy", {})
model = decoder("5M")
runs = [Lora(model, LoraSpec(rank=8 * (1 + seed % 4), seed=seed)) for seed in range(len(lengths))]
compute([Share(runs[0], batch.pack(supervised(4096, [8], 0), loss), loss, backward)])
runs[0].discard_ungathered()
shares = [Share(run, batch.pack(supervised(4096, [length], 0), loss), loss, backward) for run, length in zip(runs, lengths)]
open("/proc/self/clear_refs", "w").write("5")
before = of_process("VmRSS")
compute(shares)
print(of_process("VmHWM") - before, shared_pass_bytes(shares))
"""


WITH_STATES = {
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "linear_attention", "mlp"],
        "mamba_num_heads": 16,
        "mamba_head_dim": 32,
        "ssm_state_size": 64,
    },
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
SIZES = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def assert_an_upper_bound_and_not_a_wild_one(*arguments: str, script: str = PEAK) -> None:
    printed = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True, timeout=240).stdout
    measured, estimated = map(int, printed.split())
    assert measured <= estimated
    # What the head and a chunk of states may take is bounded for every model alike.
    assert estimated <= 4 * measured + (384 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "direction"), [("2048", "backward"), ("2048", "forward"), ("1000,1000,1000", "backward"), ("64,64", "backward")])
def test_the_estimate_is_an_upper_bound_and_not_a_wild_one(lengths, direction):
    assert_an_upper_bound_and_not_a_wild_one(lengths, direction)


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "direction"), [("2048", "backward"), ("2048", "forward"), (",".join(["20"] * 100), "backward")])
@pytest.mark.parametrize("family", WITH_STATES)
def test_it_is_one_for_layers_with_states_too(family, lengths, direction):
    assert_an_upper_bound_and_not_a_wild_one(lengths, direction, json.dumps({"model_type": family, **SIZES, **WITH_STATES[family]}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "direction"), [("700,300,800,600", "backward"), (",".join(["120"] * 16), "backward"), ("900,900,900", "forward")]
)
def test_it_is_one_for_runs_that_share_a_pass_too(lengths, direction):
    assert_an_upper_bound_and_not_a_wild_one(lengths, direction, script=SHARED_PEAK)


def test_a_longer_sequence_and_more_targets_need_more():
    model = builders.decoder()

    def needed(length: int, width: int) -> int:
        one = datum(np.zeros(length), np.zeros((length, width)), weights=np.ones((length, width)))
        return pass_bytes([one], model.config, torch.float32, exact=True, backward=True)

    assert needed(100, 1) < needed(800, 1) < needed(800, 4000)
    assert needed(800, 4000) - needed(800, 1) > 800 * 3999 * 4


def memory(free: int, whole: int = 1 << 40) -> Memory:
    return Memory(lambda device: free, lambda device: whole)


def test_what_would_not_fit_into_an_idle_engine_is_told_apart_from_what_does_not_fit_now():
    weights = builders.run().weights
    need = operation_need(learn(supervised([10, 700, 20])), weights, 512)
    assert need is not None
    assert lack(need, weights, memory(need.bytes)) is None
    whole = need.bytes + held_bytes(weights)
    now, for_ever = (lack(need, weights, memory(need.bytes - 1, size)) for size in (whole, whole - 1))
    assert now is not None
    assert for_ever is not None
    assert (now.for_ever, for_ever.for_ever) == (False, True)
    assert "longest sequence 700 tokens" in now.message
    assert now.message.endswith("of memory, 0.3 GB are free")
    assert "longest sequence 700 tokens" in for_ever.message
    assert for_ever.message.endswith("an engine that does nothing else has 0.3 GB for it: send shorter sequences or fewer soft targets")


@pytest.mark.parametrize("rank", [0, 8])
def test_a_checkpoint_takes_room_for_its_largest_tensor_too(rank):
    weights = builders.run(rank=rank).weights
    need = operation_need(SaveCheckpoint(key="checkpoints/one"), weights, 512)
    assert need is not None
    largest_bytes = max(view.nbytes for _, view in weights.named(weights.masters))
    assert need.bytes == weights.masters.numel() * CHECKPOINT_BYTES + largest_bytes


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("rank", [1, 8, 128])
def test_what_an_adapter_holds_is_foreseen(rank, experts):
    model = builders.decoder(experts=experts)
    spec = LoraSpec(rank=rank, seed=1)
    lora = Lora(model, spec)
    adam = AdamW(lora.masters)
    held = sum(tensor.nbytes for tensor in (lora.masters, lora.gradients, adam.first, adam.second)) + 2 * lora.backward_bytes
    foreseen = adapter_bytes(spec, model)
    assert held + 12 * lora.masters.numel() <= foreseen < 4 * held + 1_000_000


def test_what_cannot_fit_fails_as_the_callers_error_and_its_replay_is_not_judged_again(tmp_path):
    sent: list[OperationDone] = []
    free = iter([0] + [1 << 40] * 3)
    judging = Memory(lambda device: next(free), lambda device: 1 << 20)
    training = Training(Ledger(tmp_path / "a.in-hand"), sent.append, pass_rows=512, memory=judging)
    training.hold(HostedRun(builders.run(), lambda key, data: None, last_seq=-1, checkpoint_after=CheckpointAfter()))
    operations = [learn(supervised([30])), step(), learn(supervised([30])), step()]
    for seq, operation in enumerate([*operations, learn(supervised([9])), step()]):
        training.runs["run-1"].receive(Execute(run_id="run-1", seq=seq, operation=operation, replay=seq >= 4))
    while training.take_turn(begin=True):
        pass
    results = [done.result for done in sent]
    # The fifth judgement would find the iterator empty.
    learned = [ForwardBackwardResult, OptimStepResult]
    assert [type(result) for result in results] == [Failed, Failed, *learned, *learned]
    assert results[0].category == "user"


def test_runs_share_a_pass_only_where_memory_has_room_for_all_of_it(tmp_path):
    model, lengths = builders.decoder(), {"run-1": 200, "run-2": 200, "run-3": 20}

    def first_pass(free: int) -> list[str]:
        """Whose operations are done after the first turn."""
        sent: list[OperationDone] = []
        training = Training(Ledger(tmp_path / "a.in-hand"), sent.append, pass_rows=1024, memory=memory(free))
        for run_id, length in lengths.items():
            training.hold(HostedRun(builders.run(model, run_id=run_id), lambda key, data: None, last_seq=-1, checkpoint_after=CheckpointAfter()))
            training.runs[run_id].receive(Execute(run_id=run_id, seq=0, operation=learn(supervised([length]))))
        training.take_turn(begin=True)
        first = [done.run_id for done in sent]
        while training.take_turn(begin=True):
            pass
        assert sorted(done.run_id for done in sent) == sorted(lengths)
        assert all(isinstance(done.result, ForwardBackwardResult) for done in sent)
        return first

    loss = find_loss("cross_entropy", {})
    shares = {run_id: Share(builders.run(model).weights, pack(supervised([length]), loss), loss, True) for run_id, length in lengths.items()}
    all_three, first_and_last = shared_pass_bytes(list(shares.values())), shared_pass_bytes([shares["run-1"], shares["run-3"]])
    assert first_pass(all_three) == ["run-1", "run-2", "run-3"]
    assert first_pass(all_three - 1) == ["run-1", "run-2"]
    assert first_pass(first_and_last) == ["run-1", "run-3"]
    assert first_pass(first_and_last - 1) == ["run-1"]
