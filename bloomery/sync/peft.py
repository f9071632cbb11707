"""How PEFT names and describes an adapter.

A published blob has most of these names already: only the head is called otherwise, and experts lie stacked where PEFT
wants them one by one. Values stay where they are; only the header changes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from bloomery.types.tensor_file import TensorPlace, TensorSpec

ADAPTER: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
_HEAD: Final = (".model.unembed_tokens.", ".lm_head.")
_EXPERTS: Final = ".experts."


def peft_tensors(places: Mapping[str, TensorPlace]) -> Iterator[tuple[str, TensorSpec]]:
    """Tensors of a published blob under the names of PEFT, in the order in which their values lie there."""
    for name, place in sorted(places.items(), key=lambda item: item[1].start):
        spec = place.spec
        if _EXPERTS in name and len(spec.shape) == 3:
            for expert in range(spec.shape[0]):
                yield name.replace(_EXPERTS, f"{_EXPERTS}{expert}."), TensorSpec(spec.dtype, spec.shape[1:])
        else:
            yield name.replace(*_HEAD), spec


def peft_config(names: Iterable[str], *, base_model: str, rank: int, alpha: float) -> bytes:
    """What PEFT has to know beside the tensors."""
    # `...q_proj.lora_A.weight`: the module is the third from the end.
    modules = sorted({name.split(".")[-3] for name in names})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
    }
    return json.dumps(config, indent=2).encode() + b"\n"
