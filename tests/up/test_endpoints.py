"""The file of endpoints: what it says, and what is refused of it."""

from pathlib import Path

import pytest

from bloomery.types.errors import InvalidInput
from bloomery.types.resources import Price
from bloomery.up.endpoints import announce, read

GOOD = """
router:
  base_url: https://router.test/api/v1
  key_env: ROUTER_KEY
  models:
    vendor/model: {prompt_usd_per_mtok: 0.15, completion_usd_per_mtok: 0.6}
    vendor/other:
  projects: [default, shop]
  timeout_s: 30
  concurrency: 4
local:
  base_url: http://127.0.0.1:8000/v1
"""


def written(directory: Path, text: str) -> Path:
    file = directory / "endpoints.yaml"
    file.write_text(text)
    return file


def test_endpoints_are_read_with_what_is_left_out(tmp_path: Path) -> None:
    router, local = read(written(tmp_path, GOOD), {"ROUTER_KEY": "sk-1"})
    assert (router.name, router.base_url, router.timeout_s, router.concurrency) == ("router", "https://router.test/api/v1", 30, 4)
    assert router.models == {"vendor/model": Price(prompt_usd_per_mtok=0.15, completion_usd_per_mtok=0.6), "vendor/other": None}
    assert router.key({"ROUTER_KEY": " sk-1\n"}) == "sk-1"
    assert (local.models, local.projects, local.key({})) == (None, ("default",), None)
    assert "sk-1" not in announce(router)
    assert announce(local) == "endpoint local: http://127.0.0.1:8000/v1, any model, no key, for default"


def test_a_key_may_lie_in_a_file_beside(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-2\n")
    (found,) = read(written(tmp_path, "a: {base_url: 'http://a.test', key_file: key}"), {})
    assert found.key({}) == "sk-2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no endpoint"),
        ("- a", "names no endpoint"),
        ("a: [", "is no YAML"),
        ("a: http://a.test", "`a` has no settings"),
        ("a: {}", "`a.base_url`: Field required"),
        ("a: {base_url: 'ftp://a.test'}", "`a.base_url`"),
        ("a: {base_url: 'http://me:secret@a.test'}", "`a.base_url`"),
        ("a:\n  base_url: http://::1:8000/v1", "endpoints.yaml, line 2: `a.base_url`: `::1:8000` has more than one colon"),
        ("a: {base_url: 'http://a.test:99999'}", "`a.base_url`: the port of `a.test:99999` is none"),
        ("a: {base_url: 'http://a.test', key: sk-3}", "`a.key`: Unexpected keyword argument"),
        ("a: {base_url: 'http://a.test', models: [m]}", "`a.models`"),
        ("a: {base_url: 'http://a.test', models: {m: {prompt_usd_per_mtok: -1, completion_usd_per_mtok: 0}}}", "`a.models.m.prompt_usd_per_mtok`"),
        ("a: {base_url: 'http://a.test', concurrency: 0}", "`a.concurrency`"),
        ("a: {base_url: 'http://a.test', timeout_s: 0}", "`a.timeout_s`"),
        ("a b: {base_url: 'http://a.test'}", "`a b.name`"),
        ("a:b: {base_url: 'http://a.test'}", "`a:b.name`"),
        ("tinker: {base_url: 'http://a.test'}", "call the endpoint otherwise"),
        ("a: {base_url: 'http://a.test', key_env: UNSET}", "UNSET holds no key for endpoint `a`"),
        ("a: {base_url: 'http://a.test', key_env: TWO_LINES}", "TWO_LINES holds no key"),
        ("a: {base_url: 'http://a.test', key_file: none}", "cannot be read"),
        ("a: {base_url: 'http://a.test', key_file: none, key_env: K}", "both"),
        ("a: {base_url: 'http://a.test', timeout_s: 2020-01-01}", "`a`"),
    ],
)
def test_what_is_wrong_is_told_with_its_place_and_no_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(written(tmp_path, text), {"K": "sk-4", "TWO_LINES": "sk-5\nsk-6"})
    assert words in refused.value.message
    assert "sk-" not in refused.value.message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        read(tmp_path / "none.yaml", {})
    with pytest.raises(InvalidInput, match="directory"):
        read(tmp_path, {})
