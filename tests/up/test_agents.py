"""The file of agents: what it says, and what is refused of it. Its form is that of endpoints, whose tests are tests/up/test_endpoints.py."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from bloomery.config import AgentConfig
from bloomery.doctor import examine
from bloomery.types.errors import InvalidInput
from bloomery.up.agents import announce, read, troubles

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
        ("a: {url: 'http://a.test', url: 'http://b.test', port: 1}", 1, "`url` stands there more than once"),
        ("a: {url: 'http://a.test', port: 1, timeout_s: 2026-13-45}", 1, "is no YAML: month must be in 1..12"),
        ("a: {" * 2000, 1, "too deep"),
        ("a: {url: 'http://a.test', port: 1}", 0, "--jobs 0 runs none"),
        ("a: {url: 'http://::1:3000', port: 1}", 1, r"line 1: `a\.url`: `::1:3000` has more than one colon: an IPv6 address stands in brackets"),
        ("a: {url: 'http://[::1', port: 1}", 1, r"`a\.url`: `\[::1` has brackets that hold no IPv6 address"),
        ("a: {url: 'http://[a.test]:1', port: 1}", 1, r"`a\.url`: `\[a\.test\]:1` has brackets that hold no IPv6 address"),
        ("a: {url: 'http://[::1]x:80', port: 1}", 1, r"`a\.url`: `\[::1\]x:80` has brackets that hold no IPv6 address"),
        ("a: {url: 'http://[v1.a]:80', port: 1}", 1, r"`a\.url`: `\[v1\.a\]:80` has brackets that hold no IPv6 address"),
        ("a: {url: 'http://a.test]', port: 1}", 1, r"`a\.url`: `a\.test\]` has brackets that hold no IPv6 address"),
        ("a: {url: 'http://a\u2100.test', port: 1}", 1, r"`a\.url`: `a\u2100\.test` is no name of a host"),
        ("a: {url: 'http://a.test:', port: 1}", 1, r"`a\.url`: `a\.test:` ends where a port is to stand"),
        ("a: {url: 'http://a.test:70000', port: 1}", 1, r"`a\.url`: the port of `a\.test:70000` is none: it is a number from 1 to 65535"),
        ("a: {url: 'http://a.test:0', port: 1}", 1, r"`a\.url`: the port of"),
        ("a: {url: 'http://a.test:http', port: 1}", 1, r"`a\.url`: the port of"),
        ("a: {url: 'http:///init', port: 1}", 1, r"`a\.url`: there is no host in it"),
        ("a: {url: 'http://10.0.0.256', port: 1}", 1, r"`a\.url`: `10\.0\.0\.256` is no IPv4 address"),
        ("a: {url: 'http://a..test', port: 1}", 1, r"`a\.url`: `a\.\.test` is no name of a host"),
        ("a: {url: 'http://-a.test', port: 1}", 1, r"`a\.url`: `-a\.test` is no name of a host"),
        ("a:\n  port: 1\n  url: http://a.test\n  host: 'http://b.test'", 1, r"agents\.yaml, line 4: `a\.host`: .* without scheme, brackets or port"),
        ("a: {url: 'http://a.test', port: 1, host: '[::1]'}", 1, r"`a\.host`: .* without scheme, brackets or port"),
        ("a: {url: 'http://a.test', port: 1, host: '127.0.0.1:8701'}", 1, r"`a\.host`: .* has a port, which stands under `port`"),
        ("a: {url: 'http://a.test', port: 1, host: '::x'}", 1, r"`a\.host`: `::x` is no IPv6 address"),
        ("a: {url: 'http://a.test', port: 1, host: 'fe80::1%eth0'}", 1, r"`a\.host`: .* has a zone"),
        ("a: {url: 'http://a.test', port: 1, host: 0.0.0.0}", 1, r"`a\.host`: `0\.0\.0\.0` is every address of this machine"),
        ("a: {url: 'http://a.test', port: 1, host: '::0'}", 1, r"`a\.host`: `::0` is every address of this machine"),
        ("a: {url: 'http://a.test', port: 1}\n\nb:\n  url: http://b.test\n  port: 1", 1, "line 5: `b` has port 1, as `a` has"),
        ("a: {url: 'http://a.test', port: 1}\n# more\nb:\n  url: http://b.test\n  port: none", 1, r"line 5: `b\.port`"),
        ("a: {url: 'http://a.test', port: 1}\nb:\n  url: http://b.test", 1, r"line 2: `b\.port`: Field required"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, jobs: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as refused:
        read(written(tmp_path, text), jobs)
    assert refused.value.field == "agents"


@pytest.mark.parametrize(
    "url",
    ["http://[::1]:3000", "http://[2001:db8::1]/shop", "http://127.1", "https://a_b.test.:8443/x", "http://bücher.test", "http://localhost:1"],
)
def test_what_clients_can_ask_is_taken(tmp_path: Path, url: str) -> None:
    (agent,) = read(written(tmp_path, f"a: {{url: '{url}', port: 8701, host: '::1'}}"), 1)
    assert (agent.url, agent.host) == (url, "::1")
    assert "which says at http://[::1]:8701 how" in announce(agent)


def test_what_may_be_mended_before_a_job_begins_is_told_and_refuses_nothing(tmp_path: Path) -> None:
    (fine,) = read(written(tmp_path, "a: {url: 'http://127.0.0.1:3000', port: 28701}"), 1)
    assert not [*troubles(fine)]
    assert not [*troubles(replace(fine, url="http://[::1]:3000", host="localhost"))]
    (nowhere,) = troubles(replace(fine, url="http://agent.invalid:3000"))
    assert nowhere.startswith("agent a: of its `url` `agent.invalid` ")
    # An address that documentation has, and no machine.
    (others,) = troubles(replace(fine, host="192.0.2.1"))
    assert "of its `host` 192.0.2.1:28701 cannot be listened at (Cannot assign requested address)" in others
    assert "2001:db8::1" in next(troubles(replace(fine, host="2001:db8::1")))
    (unnamed,) = troubles(replace(fine, host="here.invalid"))
    assert "of its `host` `here.invalid` " in unnamed


def test_a_port_that_another_job_has_is_no_trouble() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        agent = AgentConfig(name="a", url="http://127.0.0.1:3000", port=taken.getsockname()[1])
        assert not [*troubles(agent)]


def test_doctor_tells_of_it(tmp_path: Path) -> None:
    file = written(tmp_path, "a: {url: 'http://127.0.0.1:3000', port: 28701}\nb: {url: 'http://127.0.0.1:3000', port: 28702, host: 192.0.2.1}")
    found = {each.text.split(":")[0]: each.problem for each in examine(tmp_path, [], "float32", None, remote=file) if each.topic == "agent"}
    assert found["a"] is None
    assert "192.0.2.1:28702 cannot be listened at" in (found["b"] or "")
