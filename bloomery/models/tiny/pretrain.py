"""Pretrain `bloomery-tiny` on this machine: `python -m bloomery.models.tiny.pretrain --minutes 60 --threads 2 --out DIR`.

Reads the corpus, takes the tokenizer of `--tokenizer DIR` or learns one, and trains until the time is over. Every few minutes the state goes to
`DIR/state.pt`, from which the same command continues, and the model so far to `DIR/weights`, a Hugging Face directory.
The demo's rows are known here and nowhere else in this package: this script is a composition root, like the server's.
"""

import argparse
import json
import time
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from bloomery.models.adapters import AdapterRows
from bloomery.models.attention import PackedAttention
from bloomery.models.decoder import Decoder
from bloomery.models.families import parse_config
from bloomery.models.head import token_logprobs
from bloomery.models.load import stored_tensors
from bloomery.models.pads import packed_positions, packed_starts
from bloomery.models.tiny.corpus import Document, read_documents
from bloomery.models.tiny.mixture import Mixture, Shelf, Weighted, held_back, routable_packages
from bloomery.models.tiny.tasks import generated
from bloomery.models.tiny.tokenizer import CONTEXT, END, END_OF_TEXT, VOCAB_SIZE, save_tokenizer, train_tokenizer
from bloomery.recipes.stdlib_docs import LABELS, SOURCES, protected

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
}
SEED = 1
STEP_TOKENS = 3072
MUON_RATE, ADAM_RATE = 0.02, 4e-3
HELD_BACK_ROWS = 100
WARM_UP_STEPS, DECAY_FROM = 30, 0.4
SAVE_EVERY_S, REPORT_EVERY = 240, 25


class Progress(NamedTuple):
    """What a resumed run must know."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def main() -> None:
    """Parse the command line and train."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    guard = protected()
    documents = read_documents(is_protected=guard.holds_part_of)
    print(f"{len(documents)} documents, {sum(len(document.text) for document in documents) / 1e6:.1f} MB", flush=True)
    tokenizer = find_tokenizer(arguments.tokenizer or arguments.out / "weights", documents)
    Trainer(tokenizer, documents, arguments.out).train(minutes=arguments.minutes)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pretrain the base model that ships with Bloomery.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="directory with a tokenizer.json to keep; default: learn one")
    return parser.parse_args()


def find_tokenizer(directory: Path, documents: list[Document]) -> Tokenizer:
    """The tokenizer that is there, or a new one from documents, balanced by package, and generated conversations."""
    if (directory / "tokenizer.json").exists():
        return Tokenizer.from_file(str(directory / "tokenizer.json"))
    random = Random(SEED)
    shelf = Shelf(documents, routable=())
    texts = [shelf.any(random).text for _ in range(len(documents) // 5)]
    return train_tokenizer([*texts, *("\n".join(generated(random)) for _ in range(len(texts) // 4))])


class Trainer:
    """The loop: bf16 weights compute, fp32 masters are updated, Muon for matrices and AdamW for the rest."""

    def __init__(self, tokenizer: Tokenizer, documents: list[Document], out: Path) -> None:
        self.tokenizer, self.out = tokenizer, out
        routable = routable_packages(documents, without={*LABELS, *chain(*SOURCES.values())})
        self.mixture = Mixture(Shelf([document for document in documents if not held_back(document)], routable=routable), tokenizer)
        self.checks = held_back_batches(Mixture(Shelf([document for document in documents if held_back(document)], routable=routable), tokenizer))
        self.decoder = new_decoder()
        self.masters = {name: weight.detach().float() for name, weight in self.decoder.named_parameters()}
        self.optimizers = make_optimizers(self.masters)
        self.progress = Progress()

    def train(self, *, minutes: float) -> None:
        """Train until `minutes` of training time have passed, in this process and the ones before it."""
        self.restore()
        began = saved = time.monotonic()
        before_s = self.progress.elapsed_s
        while (share := self.progress.elapsed_s / (60 * minutes)) < 1:
            loss = self.step(share)
            elapsed_s = before_s + time.monotonic() - began
            self.progress = Progress(self.progress.step + 1, self.progress.tokens + STEP_TOKENS, elapsed_s)
            if self.progress.step % REPORT_EVERY == 0:
                self.report(loss)
            if time.monotonic() - saved > SAVE_EVERY_S or elapsed_s >= 60 * minutes:
                self.save()
                saved = time.monotonic()
        print(f"done: {self.held_back()}", flush=True)

    def step(self, share: float) -> float:
        """One batch, one update."""
        batch = self.mixture.batch(Random(f"{SEED} {self.progress.step}"), STEP_TOKENS)
        loss = batch_loss(self.decoder, batch)
        loss.backward()
        for name, weight in self.decoder.named_parameters():
            assert weight.grad is not None
            self.masters[name].grad = weight.grad.float()
            weight.grad = None
        for optimizer, rate in zip(self.optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(self.progress.step, share)
            optimizer.step()
        self.publish_masters()
        return loss.item()

    def publish_masters(self) -> None:
        """Cast the masters into the weights that compute."""
        with torch.no_grad():
            for name, weight in self.decoder.named_parameters():
                weight.copy_(self.masters[name])

    def report(self, loss: float) -> None:
        """One line: where the run stands."""
        step, tokens, elapsed_s = self.progress
        held_back = f" {self.held_back()}" if step % (REPORT_EVERY * 4) == 0 else ""
        print(f"step {step} tokens {tokens} loss {loss:.3f} {tokens / elapsed_s:.0f} tok/s {elapsed_s / 60:.1f} min{held_back}", flush=True)

    def held_back(self) -> str:
        """The loss on each kind of text that is never trained on."""
        with torch.no_grad():
            return "held back " + " ".join(f"{name} {batch_loss(self.decoder, batch, answers_only=True):.3f}" for name, batch in self.checks.items())

    def save(self) -> None:
        """State to continue from, and the model so far."""
        state = {"masters": self.masters, "optimizers": [optimizer.state_dict() for optimizer in self.optimizers], "progress": list(self.progress)}
        torch.save(state, self.out / "state.tmp")
        (self.out / "state.tmp").replace(self.out / "state.pt")
        export(self.decoder, self.tokenizer, self.out / "weights")

    def restore(self) -> None:
        """Continue where an earlier process stopped."""
        path = self.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(*state["progress"])
        self.publish_masters()


def new_decoder() -> Decoder:
    """Random weights: matrices keep the scale of their input, and those that write to the residual stream start smaller."""
    torch.manual_seed(SEED)
    decoder = Decoder(parse_config(CONFIG), dtype=torch.bfloat16)
    for name, weight in decoder.named_parameters():
        if weight.dim() == 1:
            torch.nn.init.ones_(weight)
            continue
        writes = name.endswith((".o", ".down"))
        scale = 0.04 if name == "embedding" else weight.shape[1] ** -0.5 / ((2 * CONFIG["num_hidden_layers"]) ** 0.5 if writes else 1)
        torch.nn.init.normal_(weight, std=scale)
    return decoder


def make_optimizers(masters: dict[str, Tensor]) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, AdamW for the embedding and the norms."""
    matrices = [master for name, master in masters.items() if master.dim() == 2 and name != "embedding"]
    others = [master for name, master in masters.items() if master.dim() == 1 or name == "embedding"]
    return (
        torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )


def schedule(step: int, share: float) -> float:
    """Warm up, hold, and fall in a line to almost nothing."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, (1 - share) / (1 - DECAY_FROM) + 0.01)


def held_back_batches(mixture: Mixture) -> dict[str, list[Weighted]]:
    """Fixed batches that are never trained on, one for each kind of text."""
    random = Random("held back")
    kinds = {"plain": mixture.plain, "route": mixture.routed, "tasks": mixture.task}
    return {name: [draw(random) for _ in range(HELD_BACK_ROWS)] for name, draw in kinds.items()}


def batch_loss(decoder: Decoder, batch: list[Weighted], *, answers_only: bool = False) -> Tensor:
    """Mean negative log-probability of the next token, weighted; `answers_only` counts answers (or all of a document) alike and nothing else."""
    lengths = [len(sequence.tokens) - 1 for sequence in batch]
    rows = packed_starts(lengths)
    tokens_R, targets_R = torch.zeros(rows[-1], dtype=torch.long), torch.zeros(rows[-1], dtype=torch.long)
    weights_R = torch.zeros(rows[-1])
    for start, length, sequence in zip(rows, lengths, batch, strict=False):
        tokens_R[start : start + length] = torch.tensor(sequence.tokens[:-1])
        targets_R[start : start + length] = torch.tensor(sequence.tokens[1:])
        weights_R[start : start + length] = torch.tensor(sequence.weights[1:])
    if answers_only:
        weights_R = (weights_R >= 1).float()
    hidden_RD = decoder.hidden(tokens_R, packed_positions(lengths), PackedAttention(lengths, exact=False), AdapterRows(((None, 0, rows[-1]),)))
    logprobs_R = token_logprobs(hidden_RD, decoder.head_weight, None, targets_R[:, None])[:, 0]
    return -(logprobs_R * weights_R).sum() / weights_R.sum()


def export(decoder: Decoder, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the Hugging Face directory: weights in bf16, configs, tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    end, end_of_text = tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)
    save_file({name: view.contiguous() for name, view in stored_tensors(decoder).items()}, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", {**CONFIG, "bos_token_id": None, "eos_token_id": end, "pad_token_id": end_of_text})
    write_json(directory / "generation_config.json", {"eos_token_id": [end, end_of_text], "pad_token_id": end_of_text})
    save_tokenizer(tokenizer, directory)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
