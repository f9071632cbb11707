import json

import pytest

from bloomery.config import ApiConfig, EngineConfig, ModelConfig, to_json
from bloomery.types.errors import InvalidInput

MODEL = ModelConfig(alias="m", path="/m", base_hash="b" * 32, dtype="float32", threads=2, socket="/run/m.sock")
API = ApiConfig(data_dir="/d", host="127.0.0.1", port=8700, record="full", models=(MODEL, MODEL))


@pytest.mark.parametrize("config", [MODEL, API, EngineConfig(data_dir="/d", model=MODEL)], ids=lambda config: type(config).__name__)
def test_a_config_survives_the_disk(config: ModelConfig | ApiConfig | EngineConfig) -> None:
    assert type(config).from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("prot", 1, "prot"),
        ("port", "8700", "port"),
        ("record", "some", "record"),
        ("log_level", "loud", "log_level"),
        ("models", [{"alias": "m"}], "models.0.path"),
    ],
)
def test_unknown_keys_and_wrong_values_name_their_field(key: str, value: object, field: str) -> None:
    text = json.dumps(json.loads(to_json(API)) | {key: value})
    with pytest.raises(InvalidInput) as refused:
        ApiConfig.from_json(text)
    assert refused.value.field == field
