import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bloomery.render import ChatTokenizer
from bloomery.render.sandbox import Sandbox
from bloomery.types.errors import InvalidInput
from tests.live import alive, wait_until
from tests.render import builders

LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
USER = [{"role": "user", "content": "hello"}]


def refusal(template: str) -> str:
    with closing(Sandbox(template)) as sandbox, pytest.raises(InvalidInput) as refused:
        sandbox.render({"messages": USER})
    assert refused.value.field == "messages"
    return refused.value.message


@pytest.mark.slow
def test_a_template_that_never_ends_is_stopped_even_inside_one_instruction() -> None:
    assert "1 s of processor time" in refusal("{{ 7 ** 123456789 % 10 }}")


@pytest.mark.parametrize("template", ["{{ 'a' * 10**10 }}", "{{ [0] * 10**9 }}"])
def test_a_template_that_eats_memory_is_stopped(template: str) -> None:
    assert "512 MiB of memory" in refusal(template)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * (2**24 + 1) }}", "at most 16777216"),
        ("{% if %}", "Expected an expression"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.environ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ range(10**9) }}", "too big"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_what_a_template_may_not_do_is_said(template: str, reason: str) -> None:
    assert reason in refusal(template)


def test_deep_recursion_costs_its_own_request_only() -> None:
    template = "{% if messages[0].content == 'x' %}{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}{% endif %}ok"
    with closing(Sandbox(template)) as sandbox:
        with pytest.raises(InvalidInput):
            sandbox.render({"messages": [{"content": "x"}]})
        assert sandbox.render({"messages": USER}) == "ok"


@pytest.mark.slow
def test_rendering_goes_on_after_a_template_was_stopped() -> None:
    with closing(Sandbox("{% if loop_forever %}" + LOOP + "{% endif %}fine")) as sandbox:
        assert sandbox.render({}) == "fine"
        with pytest.raises(InvalidInput, match="processor time"):
            sandbox.render({"loop_forever": True})
        assert sandbox.render({}) == "fine"
        sandbox.close()
        assert sandbox.render({}) == "fine"


def test_the_process_ends_with_the_one_that_started_it() -> None:
    program = (
        "import os, signal\n"
        "from bloomery.render.sandbox import Sandbox\n"
        "sandbox = Sandbox('fine')\n"
        "sandbox.render({})\n"
        "print(sandbox._process._child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert said.returncode == -signal.SIGKILL
    wait_until(lambda: not alive(int(said.stdout)))


def test_renderings_do_not_see_each_other() -> None:
    with closing(Sandbox("{{ x is defined }}{% set x = 1 %}{{ x }}")) as sandbox:
        assert [sandbox.render({}) for _ in range(2)] == ["False1", "False1"]


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[ChatTokenizer]:
    with closing(ChatTokenizer.load(builders.chatml_directory(tmp_path, "{{ 'a' * 10**10 }}"))) as tokenizer:
        yield tokenizer


def test_a_hostile_template_leaves_completions_working(hostile: ChatTokenizer) -> None:
    with pytest.raises(InvalidInput, match="chat template refuses"):
        hostile.render_prompt(USER)
    assert hostile.decode(hostile.encode("The fox")) == "The fox"


def test_only_what_the_template_reads_can_be_chosen() -> None:
    think = "{% if think is not defined %}{% set think = true %}{% endif %}"
    template = think + "{% set own = 1 %}{% for each in range(own) %}{{ think }} {{ each }}{% endfor %}"
    with closing(Sandbox(template)) as sandbox:
        assert [sandbox.render({}, chosen) for chosen in ({}, {"think": "no"})] == ["True 0", "no 0"]
        for name in ("own", "each", "range", "thinks"):
            with pytest.raises(InvalidInput, match="no variable of that name") as refused:
                sandbox.render({}, {"think": 1, name: 2})
            assert refused.value.field == f"chat_template_kwargs.{name}"
        # What was not chosen is there for templates that want it.
        assert sandbox.render({"own": 2}) == "True 0"
