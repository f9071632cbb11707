"""An environment of `verifiers` as the agent of managed jobs: its rows as a data set, and a server that plays it.

    python -m bloomery.recipes.serve_verifiers my-environment --rows rows.jsonl
    python -m bloomery.recipes.serve_verifiers my-environment --port 3000 --told http://127.0.0.1:8701

The server takes Eval Protocol's `POST /init` (`remote_rollouts`), finds the row by its prompt, plays it with the model that it is told, reports the
rubric's reward, and says how the rollout ended. Importing this module takes the package.
"""

import argparse
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Self

import verifiers as vf  # type: ignore[import-not-found]

from bloomery.recipes.agent_http import JsonHandler, LocalServer
from bloomery.recipes.agents import Episode
from bloomery.recipes.remote_rollouts import DONE, FAILED, LATE, RolloutFailed, post
from bloomery.recipes.rollouts import Problem
from bloomery.recipes.verifiers_agent import VerifiersAgent
from bloomery.types.errors import BloomeryError, InvalidInput, NotFound, shown

Row = dict[str, Any]
_SAYS_WITHIN_S: Final = 30.0
_TOLD: Final = ("answer", "info", "task", "example_id")
"""Fields of a row that graders of the data set can read."""
_SERVING: Final[Mapping[str, Any]] = {"host": "127.0.0.1", "port": 3000, "told": "http://127.0.0.1:8701", "timeout_s": 120.0}
"""Options of the server, as they are where nobody gives them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows, or serve until somebody interrupts it."""
    asked = _asked(arguments)
    try:
        env = vf.load_environment(asked.environment, **asked.args)
        if asked.rows is not None:
            written = rows_of(env.get_eval_dataset() if asked.eval else env.get_dataset())
            asked.rows.write_text("".join(f"{json.dumps(row)}\n" for row in written))
            print(f"{len(written)} rows in {asked.rows}: `bloomery dataset upload NAME {asked.rows} --kind prompt` imports them")
            return 0
        with EnvironmentServer(env, asked.told, port=asked.port, host=asked.host, timeout_s=asked.timeout_s) as server:
            print(f"{len(server.rows)} rows of {asked.environment} are played at {server.url}", flush=True)
            stopped = threading.Event()
            for sign in (signal.SIGINT, signal.SIGTERM):
                signal.signal(sign, lambda *_: stopped.set())
            stopped.wait()
    except (BloomeryError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def rows_of(dataset: Any) -> list[Row]:
    """Rows of prompts, as a data set takes them."""
    found = list(_by_prompt([dict(row) for row in dataset]).values())
    return [{"messages": row["prompt"]} | {name: row[name] for name in _TOLD if row.get(name) is not None} for row in found]


class EnvironmentServer:
    """Plays rows of an environment, within its `with`; all that it trains and evaluates on."""

    def __init__(self, env: Any, told: str, *, port: int = 0, host: str = "127.0.0.1", timeout_s: float = 120.0) -> None:
        self.rows = _by_prompt([dict(row) for dataset in _datasets(env) for row in dataset])
        self._told, self._timeout_s = f"{told.rstrip('/')}/logs", timeout_s
        self._agent = VerifiersAgent(env)

        class Handler(_Handler):
            plays = self

        self._server = LocalServer(host, port, Handler)
        self.url = self._server.url

    def __enter__(self) -> Self:
        self._agent.__enter__()
        self._server.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.__exit__(*raised)
        self._agent.__exit__(*raised)

    def begin(self, body: Mapping[str, Any]) -> None:
        """Start a rollout, which ends by itself; InvalidInput where nobody knows of what."""
        row = self.rows.get(_prompt_of(body["messages"]))
        if row is None:
            raise InvalidInput("no row of the environment has this prompt: train on the rows that `--rows` writes", field="messages")
        rollout = body["metadata"]["rollout_id"]
        base_url, model = str(body["model_base_url"]), str(body["completion_params"]["model"])
        episode = Episode(rollout, Problem(rollout, (), row), base_url, str(body["api_key"]), model, rollout, base_url, self._timeout_s, list)
        threading.Thread(target=self._play, args=(episode,), daemon=True, name=f"rollout {rollout}").start()

    def _play(self, episode: Episode) -> None:
        ended = self._ended(episode)
        record = {"program": "verifiers", "status": ended._asdict(), "tags": [f"rollout_id:{episode.rollout_id}"]}
        try:
            post(self._told, record, _SAYS_WITHIN_S)
        except (RolloutFailed, TimeoutError) as error:
            # Whoever asked for it waits no more.
            print(f"rollout {episode.rollout_id}: {error}", file=sys.stderr, flush=True)

    def _ended(self, episode: Episode) -> "_Status":
        try:
            reward = self._agent(episode)
            said = {"reward": reward.value, "turns": dict(reward.turns), "parts": dict(reward.parts)}
            post(f"{episode.base_url}/reward", said, _SAYS_WITHIN_S)
        except TimeoutError as error:
            return _Status(LATE, str(error) or f"the rollout took longer than {self._timeout_s:g} s")
        except Exception as error:
            return _Status(FAILED, f"{type(error).__name__}: {error}")
        return _Status(DONE, "done")


class _Status(NamedTuple):
    code: int
    message: str


class _Handler(JsonHandler):
    plays: ClassVar[EnvironmentServer]

    def answer(self, path: str, body: dict[str, Any]) -> None:
        if path != "/init":
            raise NotFound(f"there is no {path} here: rollouts begin at /init")
        try:
            self.plays.begin(body)
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"this is no request of remote rollouts: {error!r}") from None
        self.send(200, {})


def _datasets(env: Any) -> Iterator[Any]:
    """Without one of its own to evaluate on, an environment has the other's rows; without one to train on it says so by an error."""
    yield env.get_eval_dataset()
    with suppress(ValueError):
        yield env.get_dataset()


def _by_prompt(rows: Sequence[Row]) -> dict[str, Row]:
    """Rows by what the server is told of them, each once; InvalidInput where that says not which row is meant."""
    found: dict[str, Row] = {}
    for row in rows:
        prompt = row["prompt"]
        if not isinstance(prompt, list):
            raise InvalidInput("a row's prompt is text: managed jobs ask in messages (`message_type` of the environment)", field="prompt")
        known = found.setdefault(_prompt_of(prompt), row)
        if _content(known) != _content(row):
            both = f"rows {known.get('example_id')} and {row.get('example_id')} have the same prompt, and differ otherwise"
            raise InvalidInput(f"{both}: the server is told the prompt alone, and could not say which is meant", field="prompt")
    return found


def _content(row: Row) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "example_id"}, sort_keys=True, default=str)


def _prompt_of(messages: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([[message["role"], message.get("content") or ""] for message in messages])


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.eval and asked.rows is None:
        parser.error("--eval says which rows --rows writes: give --rows FILE too, or leave it out")
    given = [f"--{name.replace('_', '-')}" for name in _SERVING if name in asked]
    if asked.rows is not None and given:
        parser.error(f"--rows writes rows and serves nothing: leave out {', '.join(given)}, or --rows")
    return argparse.Namespace(**{**_SERVING, **vars(asked)})


def _json_object(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise argparse.ArgumentTypeError(f"{shown(text)} is no JSON object, such as '{{\"name\": 1}}'")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bloomery.recipes.serve_verifiers", description="Play an environment of `verifiers`.")
    parser.add_argument("environment", help="As `verifiers` loads it: a package or module with `load_environment`.")
    parser.add_argument("--args", type=_json_object, default={}, metavar="JSON", help="What `load_environment` is given.")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="Write the rows that it trains on, for a data set of prompts, and end.")
    parser.add_argument("--eval", action="store_true", help="With --rows: those that it evaluates on.")
    parser.add_argument("--port", type=int, default=argparse.SUPPRESS, help="Where it is asked for rollouts: `url` of the file of agents.")
    parser.add_argument("--host", default=argparse.SUPPRESS, help="The address at which it listens.")
    parser.add_argument("--told", default=argparse.SUPPRESS, metavar="URL", help="Where it says how they ended: `host` and `port` there.")
    parser.add_argument("--timeout-s", type=float, default=argparse.SUPPRESS, metavar="S", help="Of one rollout.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
