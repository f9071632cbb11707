"""How many bytes `fireworks-delta-compression` takes for each step of a run, as a list in JSON.

`arc_sizes.py FILE FILE...`: safetensors files of neighbouring versions, in their order; arc_v3, with the checksum of each tensor.
"""

import json
import sys
from itertools import pairwise

from fireworks_delta_compression import delta_compress
from safetensors.torch import load_file


def main(*files: str) -> None:
    print(json.dumps([size_bytes(old, new) for old, new in pairwise(files)]))


def size_bytes(old: str, new: str) -> int:
    before, after = load_file(old), load_file(new)
    made = (delta_compress(src=before[name], dst=after[name], compression_format="arc_v3") for name in after)
    return sum(data.nbytes + len(checksum) for data, checksum in made)


if __name__ == "__main__":
    main(*sys.argv[1:])
