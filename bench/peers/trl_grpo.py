"""Train with TRL's GRPOTrainer: `python trl_grpo.py JOB.json` prints seconds of each step, those of its rollouts, and its mean reward as JSON.

The job names a model directory, prompts as token ids in the order of training, and how to sample and train. Every token is a word of its own here, so
that a prompt is the same ids for everybody, and the token that ends a text is none of the model's: all completions have one length.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

# Not `lm_head`: the trainer's fused head computes with the weight beneath a factor there, and leaves the factor out.
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Clock(TrainerCallback):
    """Notes how long each step took, from the end of the one before, so that nothing of it is left out."""

    def __init__(self):
        self.seconds = []

    def on_train_begin(self, *args, **kwargs):
        self.ended = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        now = time.perf_counter()
        self.seconds.append(now - self.ended)
        self.ended = now


class Timed(GRPOTrainer):
    """Notes how long the rollouts of each step took, with their rewards."""

    def _generate_and_score_completions(self, inputs):
        began = time.perf_counter()
        scored = super()._generate_and_score_completions(inputs)
        self.rollout_seconds.append(time.perf_counter() - began)
        return scored


def tokenizer_of(vocab_size):
    """A word for each token of the model and, beyond them, one that ends a text."""
    words = {str(token): token for token in range(vocab_size)} | {"<eos>": vocab_size}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="0", unk_token="0")


def main(job):
    torch.set_num_threads(job["threads"])
    model = Qwen3ForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    rollouts, rewards = job["groups"] * job["group_size"], []

    def mean_id(completion_ids, **columns):
        if any(len(tokens) != job["max_tokens"] for tokens in completion_ids):
            raise SystemExit("a completion ended before its length")
        found = [sum(tokens) / len(tokens) for tokens in completion_ids]
        rewards.append(sum(found) / len(found))
        return found

    settings = GRPOConfig(
        job["out"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=rollouts // job["micro_batch"],
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        temperature=1.0,
        num_iterations=1,
        beta=0.0,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=job["seed"],
    )
    clock = Clock()
    lora = {"peft_config": LoraConfig(r=job["rank"], lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")} if job["rank"] else {}
    rows = Dataset.from_dict({"prompt": [" ".join(map(str, prompt)) for prompt in job["prompts"]]})
    trainer = Timed(
        model,
        reward_funcs=mean_id,
        args=settings,
        train_dataset=rows,
        processing_class=tokenizer_of(model.config.vocab_size),
        callbacks=[clock],
        **lora,
    )
    trainer.rollout_seconds = []
    trainer.train()
    print(json.dumps({"seconds": clock.seconds, "rollout_seconds": trainer.rollout_seconds, "rewards": rewards}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
