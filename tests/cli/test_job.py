"""`bloomery job`, `deployment`, `grader` and `model` as their users type them, on a real server."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli.job import _cell, _columns, _samples
from bloomery.cli.show import console
from bloomery.cli.specs import checked, put_options, read
from bloomery.client import Client
from bloomery.types.errors import InvalidInput
from bloomery.types.jobs import JobPoint, JobSample, JobSpec
from tests.jobs.test_methods_live import GRADER, answer, asked, chat, lines, pairs, prompt
from tests.live import BLOOMERY, LiveServer, wait_until


@pytest.fixture(scope="module")
def server(live_server: LiveServer) -> LiveServer:
    with Client(live_server.url, live_server.key) as client:
        client.datasets.create("cli-chats")
        client.datasets.add_version("cli-chats", {"train": lines([chat(each) for each in pairs(16, 1)]), "eval": lines([chat(pairs(1, 9)[0])])})
    return live_server


def bloomery(server: LiveServer, *arguments: str, expect: int = 0) -> str:
    done = subprocess.run([BLOOMERY, *arguments, "--data-dir", str(server.data_dir)], capture_output=True, text=True, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout if expect == 0 else done.stderr or done.stdout


def as_json(server: LiveServer, *arguments: str) -> Any:
    return json.loads(bloomery(server, *arguments, "--json"))


@pytest.mark.slow
def test_a_job_is_followed_to_its_end_compared_cloned_and_deployed(server: LiveServer, tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    fields = ("base_model: bloomery-tiny", "data: {dataset: cli-chats}", "method: {kind: sft, batches: {rows: 8}}", "evaluation: {served_every: 1}")
    spec.write_text("\n".join((*fields, "seed: 1")))
    said = bloomery(server, "job", "create", "typed", "--file", str(spec), "--epochs", "1", "--set", "evaluation.answers=1", "--watch")
    assert "typed  succeeded" in said
    assert "exact" in said
    assert "`bloomery deployment create NAME typed` serves it" in said
    assert "held-out answers:" in said
    shown = as_json(server, "job", "show", "typed")
    assert (shown["progress"]["step"], shown["spec"]["method"]["batches"]["rows"]) == (2, 8)
    assert f"digest of the weights {shown['result']['digest']}" in said
    (sample,) = shown["result"]["samples"]
    assert (sample["asked"], sample["reference"]) == (asked(pairs(1, 9)[0])[-1]["content"], answer(pairs(1, 9)[0])["content"])
    assert [sample[name] in said for name in ("asked", "reference")] == [True, True]
    assert "typed" in bloomery(server, "job", "list")
    published = [line.split()[:3] for line in bloomery(server, "model", "versions").splitlines()]
    assert [shown["result"]["version"], "typed", "final"] in published
    assert f'"BLOOMERY_URL", {server.url!r}' in bloomery(server, "job", "eject", "typed")
    said = bloomery(server, "export", "typed", "--out", str(tmp_path / "weights"))
    assert f"version {shown['result']['version']} of bloomery-tiny" in said
    assert "published as version" in bloomery(server, "job", "events", "typed")
    assert [point["step"] for point in as_json(server, "job", "points", "typed")] == [1, 2]
    assert bloomery(server, "job", "points", "typed").splitlines()[0].split() == ["step", "loss", "learning_rate", "gradient_norm", "served/exact"]
    again = as_json(server, "job", "clone", "typed", "typed-again", "--set", "method.optimizer.learning_rate=0.002", "--watch")
    assert again["state"] == "succeeded"
    differ = as_json(server, "job", "compare", "typed", "typed-again")["differ"]
    assert differ == {"method.optimizer.learning_rate": [0.001, 0.002], "name": ["typed", "typed-again"]}
    assert shown["result"]["version"] in bloomery(server, "deployment", "create", "typed-model", "typed", "--evidence", "typed")
    measured = {name: shown["result"][name] for name in ("base_version", "compared")}
    evidence = as_json(server, "deployment", "show", "typed-model")["live"]["evidence"]
    assert evidence == {"jobs": [{"job": shown["id"], "name": "typed", **measured}]}
    assert "name an evaluation of those" in bloomery(server, "deployment", "promote", "typed-model", "typed-again", "--evidence", "typed", expect=2)
    taken = bloomery(server, "deployment", "create", "typed-model", "typed", expect=2)
    assert "`bloomery deployment promote typed-model VERSION`" in taken
    assert "revision 2" in bloomery(server, "deployment", "promote", "typed-model", "typed-again")
    assert "revision 1" in bloomery(server, "deployment", "rollback", "typed-model", "1")
    assert {row["number"] for row in as_json(server, "deployment", "show", "typed-model")["revisions"]} == {1, 2}
    assert "typed-model" in bloomery(server, "deployment", "list")
    assert shown["result"]["version"] in bloomery(server, "model", "versions")
    card = bloomery(server, "model", "card", "typed")
    assert card.startswith("---\nlicense: unknown\n")
    assert bloomery(server, "model", "card", "typed-model") == card
    assert as_json(server, "model", "card", shown["result"]["version"])["job"] == "typed"
    assert "bloomery-tiny" in bloomery(server, "model", "list")


def test_points_of_reinforcement_say_what_the_version_of_each_step_took_to_travel_and_of_how_much() -> None:
    values: dict[str, float | None] = {"reward/raw": 0.5, "sync/delta": 1.0, "sync/bytes": 71_234.0, "sync/whole_bytes": 17_000_000.0}
    names = _columns([JobPoint(step=1, values={"reward/raw": 0.25}), JobPoint(step=2, values=values)])
    assert names == ["reward/raw", "sync/bytes", "sync/whole_bytes"]
    assert [_cell(name, values[name]) for name in names] == ["0.5", "71,234 bytes", "17.0 MB"]
    assert _cell("sync/bytes", None) == "-", "nothing was trained"


def test_a_few_answers_are_shown_in_their_beginnings_with_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2Jgone\rback\x9b31m [bold]plain[/bold]"
    first = JobSample(row=7, asked="what?", reference="that", rejected="this", before=hostile, after="y" * 301, before_reward=0.25, after_reward=1.0)
    others = [JobSample(row=row, asked="more?", before="", after="said") for row in range(3)]
    console().print(_samples("judged", [first, *others]))
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines()[:3]] == [["held-out", "answers:"], ["row", "7", "asked", "what?"], ["reference", "that"]]
    assert "\\x1b[2Jgone\\x0dback\\x9b31m [bold]plain[/bold]" in said
    assert not set(said) & {"\x1b", "\r", "\x9b"}
    assert ["before, reward 0.25" in said, "after, reward 1" in said, f"{'y' * 297}..." in said, "y" * 298 in said] == [True, True, True, False]
    assert (said.count("more?"), said.splitlines()[-1].strip()) == (2, "1 more: `bloomery job show judged --json`")


@pytest.mark.slow
def test_a_job_is_paused_resumed_and_cancelled(server: LiveServer) -> None:
    def state() -> str:
        found: str = as_json(server, "job", "show", "steered")["state"]
        return found

    bloomery(server, "job", "create", "steered", "--dataset", "cli-chats", "--epochs", "900", "--set", "evaluation.answers=0")
    wait_until(lambda: as_json(server, "job", "show", "steered")["progress"]["step"] > 0)
    assert bloomery(server, "job", "pause", "steered") == "steered is running, and pauses within seconds\n"
    wait_until(lambda: state() == "paused")
    assert "`bloomery job resume steered` has it go on" in bloomery(server, "job", "show", "steered")
    assert "cannot be paused" in bloomery(server, "job", "pause", "steered", expect=2)
    assert as_json(server, "job", "resume", "steered")["state"] in ("queued", "running")
    assert bloomery(server, "job", "cancel", "steered") in (
        "steered is cancelled\n",
        "steered is running, and ends within seconds\n",
    )
    wait_until(lambda: state() == "cancelled")


def test_a_dry_run_shows_every_field_and_makes_nothing(server: LiveServer) -> None:
    said = as_json(server, "job", "create", "dry", "--dataset", "cli-chats", "--dry-run")
    assert said["spec"]["method"]["batches"]["rows"] == 32
    assert (said["estimate"]["rows"], said["estimate"]["steps"], said["estimate"]["cost"]) == (16, 2, None)
    priced = as_json(server, "job", "create", "dry", "--dataset", "cli-chats", "--dry-run", "--tokens-per-s", "100", "--price-per-hour", "36")[
        "estimate"
    ]
    assert priced["seconds"] == pytest.approx(priced["tokens"] / 100, abs=0.1)
    assert priced["cost"] == pytest.approx(priced["seconds"] / 100)
    assert "give --dry-run, too" in bloomery(server, "job", "create", "dry", "--dataset", "cli-chats", "--price", "1", expect=2)
    assert "no job `dry`" in bloomery(server, "job", "show", "dry", expect=2)


def test_the_temperature_of_reinforcement_and_what_becomes_of_groups_rewarded_alike_are_flags_and_fields(server: LiveServer, tmp_path: Path) -> None:
    with Client(server.url, server.key) as client:
        client.datasets.create("cli-prompts")
        client.datasets.add_version("cli-prompts", {"train": lines([prompt(each) for each in pairs(8, 1)]), "eval": lines([prompt(pairs(1, 9)[0])])})
        client.graders.create("cli-right", {"type": "function", "source": GRADER, "entry": "score"})
    file = tmp_path / "job.yaml"
    file.write_text("data: {dataset: cli-prompts}\nmethod: {kind: rft, grader: cli-right, temperature: 0.6}\n")
    create = ("job", "create", "warm", "--file", str(file), "--dry-run")
    found = [as_json(server, *create, *flags)["spec"]["method"]["temperature"] for flags in ((), ("--temperature", "1.3"))]
    assert found == [0.6, 1.3]
    assert "method.temperature" in bloomery(server, *create, "--temperature", "0", expect=2)
    assert "method.temperature" in bloomery(server, *create, "--temperature", "nan", expect=2)
    supervised = ("job", "create", "cold", "--dataset", "cli-chats", "--method", "sft", "--temperature", "0.8", "--dry-run")
    assert "method.temperature" in bloomery(server, *supervised, expect=2)
    alike = [as_json(server, *create, *flags)["spec"]["method"]["zero_variance"] for flags in ((), ("--zero-variance", "keep"))]
    assert alike == ["drop", "keep"]
    of_another = ("job", "create", "cold", "--dataset", "cli-chats", "--method", "sft", "--zero-variance", "keep", "--dry-run")
    assert "method.zero_variance" in bloomery(server, *of_another, expect=2)


def test_a_chain_is_made_of_a_file_followed_and_shown_with_what_comes_before_and_behind(server: LiveServer, tmp_path: Path) -> None:
    file = tmp_path / "chain.yaml"
    stage = "{method: {kind: sft, batches: {rows: 8}}, begin: {gate: {measure: loss, bound: GATE}}}"
    shared = "name: staged\nbase_model: bloomery-tiny\ndata: {dataset: cli-chats}\nseed: 1\nevaluation: {answers: 0}\nstages:\n- {}\n"
    file.write_text(f"{shared}- {stage.replace('GATE', '1000')}\n- {stage.replace('GATE', '0')}\n")
    planned = as_json(server, "job", "create", "--file", str(file), "--epochs", "1", "--dry-run")
    assert [(each["spec"]["name"], each["estimate"]["rows"]) for each in planned] == [("staged-1", 16), ("staged-2", 16), ("staged-3", 16)]
    assert "no job `staged-1`" in bloomery(server, "job", "show", "staged-1", expect=2)
    jobs = json.loads(bloomery(server, "job", "create", "--file", str(file), "--epochs", "1", "--watch", "--json", expect=1))
    assert [job["state"] for job in jobs] == ["succeeded", "succeeded", "failed"]
    shown = bloomery(server, "job", "show", "staged-2")
    assert "begins with staged-1 (sft, succeeded)\nif its loss has reached 1000\nthen staged-3 (sft, failed)\n" in shown
    assert "begins with staged-2 (sft, succeeded) < staged-1 (sft, succeeded)" in bloomery(server, "job", "show", "staged-3")
    # Whoever watches is told by the status how it ended.
    bloomery(server, "job", "show", "staged-3", "--watch", expect=1)
    bloomery(server, "job", "show", "staged-2", "--watch")
    assert '"begin", checkpoint' not in bloomery(server, "job", "eject", "staged-2")


@pytest.mark.slow
def test_who_stops_watching_is_told_that_the_job_goes_on(server: LiveServer) -> None:
    argv = [BLOOMERY, "job", "create", "left-alone", "--dataset", "cli-chats", "--epochs", "500", "--watch", "--data-dir", str(server.data_dir)]

    def hear_interrupts() -> None:
        """Whoever runs the tests in a shell's background has their children ignore them."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts) as watching:
        assert watching.stdout is not None
        assert any("is running" in line for line in watching.stdout)
        watching.send_signal(signal.SIGINT)
        said = watching.stdout.read()
    assert watching.returncode == 130
    assert "`left-alone` goes on: `bloomery job show left-alone --watch` follows it again" in said
    assert as_json(server, "job", "cancel", "left-alone")["state"] in ("running", "cancelled")


@pytest.mark.parametrize("option", ["seed=[1", "method.kind=: :", "seed"])
def test_an_option_that_cannot_be_read_is_refused_by_its_name(option: str) -> None:
    with pytest.raises(InvalidInput, match="--set"):
        put_options({}, [option])


def test_what_is_wrong_is_one_line_with_the_field(server: LiveServer) -> None:
    said = bloomery(server, "job", "create", "wrong", "--dataset", "cli-chats", "--set", "method.batches.rowz=3", expect=2)
    assert said == "error: `method.batches.rowz`: there is no such field; there is `method.batches.rows` and `evaluation.rows`\n"
    assert bloomery(server, "job", "create", "wrong", expect=2) == "error: `data`: this is missing; give --dataset NAME\n"
    said = bloomery(server, "job", "create", "two words", "--dataset", "cli-chats", expect=2)
    assert said == "error: `name`: a name is letters, digits, `.`, `_` and `-`, and begins with a letter or a digit\n"
    assert "--set takes FIELD=VALUE" in bloomery(server, "job", "create", "wrong", "--dataset", "cli-chats", "--set", "rank", expect=2)
    assert "leave out --watch" in bloomery(server, "job", "create", "wrong", "--dataset", "cli-chats", "--dry-run", "--watch", expect=2)


def test_a_field_that_is_misspelled_is_told_before_the_one_that_is_missing_for_it() -> None:
    with pytest.raises(InvalidInput, match=r"`dataset`: there is no such field; there is `data\.dataset`$"):
        checked(JobSpec, {"name": "x", "base_model": "bloomery-tiny", "dataset": "chats", "method": {"kind": "sft"}})
    other = {"name": "x", "base_model": "bloomery-tiny", "data": {"dataset": "chats"}, "method": {"kind": "sft", "group_size": 4}}
    with pytest.raises(InvalidInput, match=r"`method\.group_size`: there is no such field; another `kind` has it$"):
        checked(JobSpec, other)
    with pytest.raises(InvalidInput, match=r"`nonsense`: there is no such field$"):
        checked(JobSpec, {"nonsense": 1})


def test_a_rate_as_people_write_it_is_a_number_in_options_and_files(tmp_path: Path) -> None:
    spec: dict[str, Any] = {}
    put_options(spec, ["a=1e-3", "b=2.5e4", "c=-1E+2", "d=1e", "e=0x1e", "f='1e-3'"])
    assert spec == {"a": 0.001, "b": 25000.0, "c": -100.0, "d": "1e", "e": 30, "f": "1e-3"}
    file = tmp_path / "job.yaml"
    file.write_text("learning_rate: 1e-3\n")
    assert read(file) == {"learning_rate": 0.001}


def test_what_would_count_for_nothing_is_refused_by_flags_and_files_alike(server: LiveServer, tmp_path: Path) -> None:
    reinforced = ("--dataset", "cli-chats", "--method", "rft", "--set", "method.grader=g")
    said = bloomery(server, "job", "create", "stale", *reinforced, "--set", "method.max_staleness=4", expect=2)
    assert "`max_staleness` is 4" in said
    assert "set `asynchronous`" in said
    file = tmp_path / "job.yaml"
    file.write_text("name: unseen\nbase_model: bloomery-tiny\ndata: {dataset: cli-chats}\nmethod: {kind: rft, grader: g, held_out_share: 0.5}\n")
    said = bloomery(server, "job", "create", "--file", str(file), expect=2)
    assert "`held_out_share` is 0.5" in said
    assert "no data set `nothing`" in bloomery(server, "job", "create", "wrong", "--dataset", "nothing", expect=2)


@pytest.mark.slow
def test_a_grader_is_kept_and_tried(server: LiveServer, tmp_path: Path) -> None:
    program, outputs = tmp_path / "right.py", tmp_path / "outputs.jsonl"
    program.write_text(GRADER)
    given = pairs(1, 3)[0]
    rows = [{"item": {"pairs": given}, "output": text, "messages": asked(given)} for text in (answer(given)["content"], "none")]
    outputs.write_text(lines(rows))
    assert "is version 1" in bloomery(server, "grader", "create", "typed-grader", str(program))
    results = as_json(server, "grader", "test", "typed-grader", str(outputs))["results"]
    assert [result["score"] for result in results] == [1.0, 0.0]
    assert "typed-grader" in bloomery(server, "grader", "list")
    assert "def score" in bloomery(server, "grader", "show", "typed-grader")
    declared = tmp_path / "check.json"
    declared.write_text(json.dumps({"type": "string_check", "name": "c", "input": "{{sample.output_text}}", "reference": "a", "operation": "eq"}))
    assert as_json(server, "grader", "create", "typed-check", str(declared))["spec"]["type"] == "string_check"
