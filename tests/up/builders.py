"""A model directory and a filled data directory, made without torch."""

import json
import math
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from bloomery.config.data_dir import DataDir
from bloomery.up import layout
from bloomery.up.lock import locked

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def model(directory: Path, *, seed: int = 0, words: int = 64) -> Path:
    """A random one-layer model in the form `save_pretrained` writes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {f"w{index}": index for index in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    random = np.random.default_rng(seed)
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in _shapes(vocabulary=64, hidden=32).items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def giant(directory: Path) -> Path:
    """A model of a terabyte; behind its header the weights file is a hole."""
    vocabulary, hidden = 1 << 24, 1 << 14
    model(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocabulary, "hidden_size": hidden, "head_dim": 16}))
    header, end = {}, 0
    for name, shape in _shapes(vocabulary, hidden).items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
    return directory


def _shapes(vocabulary: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "model.layers.0.input_layernorm.weight": (hidden,),
        "model.layers.0.post_attention_layernorm.weight": (hidden,),
        "model.layers.0.self_attn.q_proj.weight": (32, hidden),
        "model.layers.0.self_attn.k_proj.weight": (16, hidden),
        "model.layers.0.self_attn.v_proj.weight": (16, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, 32),
        "model.layers.0.mlp.gate_proj.weight": (48, hidden),
        "model.layers.0.mlp.up_proj.weight": (48, hidden),
        "model.layers.0.mlp.down_proj.weight": (hidden, 48),
    }


def data_dir(root: Path) -> DataDir:
    """A data directory with a row, a blob, and a journal of two segments."""
    data = DataDir(root)
    layout.create(data)
    with locked(data):
        layout.bring_up_to_date(data)
    with closing(sqlite3.connect(data.database)) as database, database:
        database.execute("create table note (text)")
        database.execute("insert into note values ('kept')")
    files = {
        "api_key": b"tml-a-development-key\n",
        "chain_key": bytes(range(32)),
        "chain_key.pub": b"03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8\n",
        "blobs/checkpoints/run-1/3-ab.safetensors": b"weights",
        "runs/run-1/ops-000000000001.seg": b"operations",
        "runs/run-1/results-000000000001.seg": b"results",
    }
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return data
