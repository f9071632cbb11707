"""The file of agents: what it says, and what is refused of it. Its form is that of endpoints, whose tests are tests/up/test_endpoints.py."""

from pathlib import Path

import pytest

from bloomery.types.errors import InvalidInput
from bloomery.up.agents import announce, read

GOOD = """
counter: {url: 'http://127.0.0.1:3000', port: 8701}
shop:
  url: https://agents.test/shop
  port: 8702
  host: 10.0.0.5
  projects: [shop]
  timeout_s: 600
"""


def written(directory: Path, text: str) -> Path:
    file = directory / "agents.yaml"
    file.write_text(text)
    return file


def test_agents_are_read_with_what_is_left_out(tmp_path: Path) -> None:
    counter, shop = read(written(tmp_path, GOOD), 1)
    assert (counter.host, counter.projects, counter.timeout_s) == ("127.0.0.1", ("default",), 120)
    assert (shop.url, shop.port, shop.host, shop.projects, shop.timeout_s) == ("https://agents.test/shop", 8702, "10.0.0.5", ("shop",), 600)
    assert announce(counter) == "agent counter: http://127.0.0.1:3000, which says at http://127.0.0.1:8701 how rollouts ended, for default"


@pytest.mark.parametrize(
    ("text", "jobs", "words"),
    [
        ("", 1, "names no agent"),
        ("a: {port: 1}", 1, r"`a\.url`"),
        ("a: {url: 'http://a.test'}", 1, r"`a\.port`"),
        ("a: {url: 'ftp://a.test', port: 1}", 1, r"`a\.url`"),
        ("a: {url: 'http://a.test', port: 70000}", 1, r"`a\.port`"),
        ("a: {url: 'http://a.test', port: 1, key: x}", 1, r"`a\.key`"),
        ("a: http://a.test", 1, "give it a `url` at least"),
        ("a: {url: 'http://a.test', port: 1}\nb: {url: 'http://b.test', port: 1}", 1, "`b` has port 1, as `a` has"),
        ("a: {url: 'http://a.test', port: 1}\na: {url: 'http://b.test', port: 2}", 1, "`a` stands there more than once"),
        ("1: {url: 'http://a.test', port: 1}\n'1': {url: 'http://a.test', port: 1}", 1, "`1` stands there more than once"),
        ("a: {" * 2000, 1, "too deep"),
        ("a: {url: 'http://a.test', port: 1}", 0, "--jobs 0 runs none"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, jobs: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as refused:
        read(written(tmp_path, text), jobs)
    assert refused.value.field == "agents"
