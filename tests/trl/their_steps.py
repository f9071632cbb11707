"""Steps with TRL's trainers, in an environment that has them: `python their_steps.py JOB.json`.

The job names a folder and model directories, and cases by name: the trainer, its arguments, and its data. Of each case the folder then has
`NAME.json`, the loss of every step, and `NAME.N.safetensors`, the gradients of step N as they are when the optimizer is called. Nothing of a trainer
is replaced: the loss is noted as its own `compute_loss` gives it.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen3ForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

ALIKE = {
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


class Gradients(TrainerCallback):
    """Writes them."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        save_file(found, self.folder / f"{self.name}.{state.global_step}.safetensors")


def noting(trainer):
    """The trainer, which also keeps the losses that it computes."""

    class Noting(trainer):
        losses = ()

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.losses = (*self.losses, loss.item())
            return loss

    return Noting


def main(job):
    torch.set_num_threads(1)
    folder = Path(job["folder"])
    tokenizer = AutoTokenizer.from_pretrained(job["policy"])
    for name, case in job["cases"].items():
        model = Qwen3ForCausalLM.from_pretrained(job["policy"], dtype=torch.float32)
        callback = Gradients(folder, name)
        common = {"processing_class": tokenizer, "callbacks": [callback]}
        trainer = TRAINERS[case["trainer"]](job, case, model, {**ALIKE, **case["arguments"], "output_dir": str(folder / name)}, common)
        trainer.train()
        (folder / f"{name}.json").write_text(json.dumps(trainer.losses))


def sft(job, case, model, arguments, common):
    settings = SFTConfig(**arguments, dataset_kwargs={"skip_prepare_dataset": True})
    return noting(SFTTrainer)(model, args=settings, train_dataset=Dataset.from_list(case["rows"]), **common)


def dpo(job, case, model, arguments, common):
    reference = Qwen3ForCausalLM.from_pretrained(job["reference"], dtype=torch.float32)
    rows = Dataset.from_list(case["rows"])
    return noting(DPOTrainer)(model, ref_model=reference, args=DPOConfig(**arguments), train_dataset=rows, **common)


def orpo(job, case, model, arguments, common):
    return noting(ORPOTrainer)(model, args=ORPOConfig(**arguments), train_dataset=Dataset.from_list(case["rows"]), **common)


def grpo(job, case, model, arguments, common):
    """With the rollouts of the case, instead of ones that it draws."""

    def rollouts(prompts, trainer):
        rows = case["rows"]
        return {"prompt_ids": [row["prompt"] for row in rows], "completion_ids": [row["tokens"] for row in rows], "logprobs": None}

    def rewards(completions, **columns):
        return [row["reward"] for row in case["rows"]]

    prompts = Dataset.from_dict({"prompt": [str(group) for group in range(len(case["rows"]) // arguments["num_generations"])]})
    settings = GRPOConfig(**arguments, steps_per_generation=1, shuffle_dataset=False)
    return noting(GRPOTrainer)(model, reward_funcs=rewards, args=settings, train_dataset=prompts, rollout_func=rollouts, **common)


TRAINERS = {"sft": sft, "dpo": dpo, "orpo": orpo, "grpo": grpo}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
