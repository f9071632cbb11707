"""Train with TRL's SFTTrainer: `python trl_steps.py JOB.json` prints seconds, tokens and loss of each step as JSON.

The job names a model directory, batches of `input_ids` and `labels` in the order of training, the threads, whether to train LoRA, and under
`arguments` those of `SFTConfig` that differ between the forms that are compared.
"""

import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Clock(TrainerCallback):
    """Notes how long each step took, and its loss."""

    def __init__(self):
        self.seconds, self.losses = [], []

    def on_step_begin(self, *args, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self.began)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])


class InOrder(SFTTrainer):
    """The batches as they come."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main(job):
    torch.set_num_threads(job["threads"])
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<unk>", unk_token="<unk>")
    rows = {name: [row[name] for batch in job["batches"] for row in batch] for name in ("input_ids", "labels")}
    settings = SFTConfig(
        job["out"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        optim="adamw_torch_fused",
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        **job["arguments"],
    )
    clock = Clock()
    lora = {"peft_config": LoraConfig(r=8, lora_alpha=32, target_modules=TARGETS)} if job["lora"] else {}
    data = Dataset.from_dict(rows)
    trainer = InOrder(job["model"], args=settings, train_dataset=data, processing_class=tokenizer, callbacks=[clock], **lora)
    tokens = [real_tokens(batch) for batch in islice(trainer.get_train_dataloader(), settings.max_steps)]
    trainer.train()
    print(json.dumps({"seconds": clock.seconds, "losses": clock.losses, "tokens": tokens}))


def real_tokens(batch):
    """Without pads, of which a batch that says nothing of attention has none."""
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
