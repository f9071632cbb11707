"""What runs where `fireworks-delta-compression` is installed, and imports nothing of Bloomery.

`encode FORMAT OLD NEW DELTA` compares two safetensors files; `apply FORMAT OLD DELTA NEW` makes the second of the first, in memory and in place, and
fails when these two ways give files that differ.
"""

import shutil
import sys
from pathlib import Path

import torch
from fireworks_delta_compression import delta_compress_files_to_file, delta_decompress_dict_from_file, delta_decompress_inplace
from safetensors.torch import load_file, save_file


def encode(form: str, old: str, new: str, delta: str) -> None:
    delta_compress_files_to_file(src=old, dst=new, diff_file=delta, compression_format=form)


def apply(form: str, old: str, delta: str, new: str) -> None:
    in_memory = delta_decompress_dict_from_file(src=load_file(old), diff_file=delta, compression_format=form)
    save_file(in_memory, new)
    in_place = Path(new).with_suffix(".in_place")
    shutil.copyfile(old, in_place)
    delta_decompress_inplace(base_path=str(in_place), diff_path=delta, compression_format=form)
    for name, tensor in load_file(in_place).items():
        if not torch.equal(_bytes(tensor), _bytes(in_memory[name])):
            raise SystemExit(f"{name} differs in place")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


if __name__ == "__main__":
    {"encode": encode, "apply": apply}[sys.argv[1]](*sys.argv[2:])
