"""Every verb of every service asks for a scope before it does anything, and shows nothing of one project to another.

The verbs are found by looking at the services themselves, so one that is added must be added here too: to `SCOPES_OF`, and to one of the tables
that say what a stranger gets.
"""

import asyncio
import importlib
import inspect
import pkgutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pytest

from bloomery import services as package
from bloomery.config import ApiConfig
from bloomery.services.access.principal import SCOPES, Principal
from bloomery.services.clients.session_search import SessionFilter
from bloomery.services.clients.sessions import Session
from bloomery.services.core import Services
from bloomery.services.kinds import EXTERNAL, NAMED
from bloomery.services.weights.versions import Version
from bloomery.types.arrays import Array
from bloomery.types.errors import Forbidden, NotFound
from bloomery.types.generation import Generate, SamplingParams, Weights
from bloomery.types.operations import CheckpointResult, SnapshotResult
from bloomery.types.resources import Curate, GiveFeedback, ImportRows
from tests.services.fake_engine import BASE, FakeEngine, fake_base
from tests.services.runs_stage import LORA, ME, STRANGER, operation, play
from tests.services.stage import chat

LOOK = "read train"
SCOPES_OF = {
    "Audit.entries": "admin",
    "Audit.storage": "read admin",
    "Auth.create": "admin",
    "Auth.list": "admin",
    "Auth.revoke": "admin",
    "Cards.get": "read train deploy",
    "Cards.measure": "train deploy",
    "Checkpoints.delete": "train",
    "Checkpoints.find": LOOK,
    "Checkpoints.latest": LOOK,
    "Checkpoints.list": LOOK,
    "Checkpoints.name_at": LOOK,
    "Checkpoints.named": LOOK,
    "Checkpoints.own": "train",
    "Checkpoints.set_ttl": "train",
    "Curation.judged": "train",
    "CustomLosses.attach": "train",
    "CustomLosses.create": "train",
    "CustomLosses.get": "train",
    "Datasets.create": "train",
    "Datasets.curate": "train",
    "Datasets.get": LOOK,
    "Datasets.import_rows": "train",
    "Datasets.list": LOOK,
    "Datasets.rows": LOOK,
    "Deployments.create": "deploy",
    "Deployments.get": "read deploy",
    "Deployments.list": "read deploy",
    "Deployments.live_version": "read train deploy",
    "Deployments.names": "infer read deploy",
    "Deployments.promote": "deploy",
    "Deployments.rollback": "deploy",
    "Deployments.target": "infer",
    "Exports.file": LOOK,
    "Exports.lay_out": LOOK,
    "External.offer": LOOK,
    "Garbage.collect": "admin",
    "Judgements.give": "infer",
    "Judgements.list": "read",
    "RunMetricsReader.series": LOOK,
    "Models.list": "infer read train deploy",
    "Publishing.copy": "train",
    "Publishing.publish": "train",
    "Publishing.unpublish": "train",
    "Runs.checkpoint": "train",
    "Runs.create": "train",
    "Runs.get": LOOK,
    "Runs.list": LOOK,
    "Runs.load": "train",
    "Runs.note_arriving": "train",
    "Runs.result": LOOK,
    "Runs.snapshot": "train",
    "Runs.submit": "train",
    "Runs.unload": "train",
    "Runs.waiting_for": LOOK,
    "Sampling.resolve": "infer",
    "Sampling.served": "infer",
    "Sampling.stream": "infer",
    "SessionSearch.find": LOOK,
    "Sessions.create": "train infer",
    "Sessions.create_sampling": "train infer",
    "Sessions.finish": "train infer",
    "Sessions.follow": "train infer",
    "Sessions.get": LOOK,
    "Sessions.get_sampling": "infer read",
    "Sessions.heartbeat": "train infer",
    "Sessions.join_sampling": "infer",
    "Sessions.list": LOOK,
    "Sessions.require_open": "train infer",
    "Sessions.run_names": LOOK,
    "Sessions.samplers": LOOK,
    "Traffic.body": "read",
    "Traffic.get": "read",
    "Traffic.list": "read",
    "Versions.find": "infer read train deploy",
}
"""Any one of the scopes is enough."""
OF_THE_KEY_ITSELF = {
    "Auth.mine",
    "Auth.give_up",
    "RateLimits.give_back",
    "RateLimits.headers",
    "RateLimits.prompt",
    "RateLimits.request",
    "RateLimits.rollout",
    "RateLimits.sampled",
}
"""Any key may look at itself, give itself up, and use up what it may."""
NOT_ASKED_BY_CALLERS = {
    # What a process does for itself, or what says who calls in the first place.
    "Cards": {"next", "on"},
    "Auth": {"load", "check", "check_fingerprint", "note_use"},
    "Deployments": {"load"},
    "Identity": {"check", "exchange"},
    "Fleet": {"beside", "group", "want"},
    "Garbage": {"expire", "tidy"},
    "CustomLosses": {"require_offered"},
    "Meters": {"exposition", "refused", "request"},
    "Models": {"load", "all", "named", "resolve", "size", "tokenizer", "check_room"},
    "Rendering": {"prompt", "encode"},
    "Sessions": {"forget", "note_asked", "store_asked"},
    "Traffic": {"record", "flush", "state"},
    # Behind a verb that has asked already, or a signature of this server.
    "Checkpoints": {"announce", "signed"},
    "Exports": {"of"},
    "External": {"open"},
}


class World(NamedTuple):
    """Names of things of one project, or of nobody's."""

    run: str
    tinker_run: str
    session: str
    sampler: str
    saved: str
    published: str
    exported: str
    version: str
    deployment: str
    dataset: str
    dataset_version: str
    manifest: str
    span: str
    episode: str

    @property
    def path(self) -> str:
        """Of the checkpoint."""
        return f"tinker://{self.tinker_run}/weights/{self.saved}"

    @property
    def sampler_path(self) -> str:
        """Of the snapshot."""
        return f"tinker://{self.tinker_run}/sampler_weights/{self.published}"


Attempt = Callable[[Services, World], Awaitable[Any]]
REQUEST = Generate(
    request_id="", weights=Weights(version=BASE), prompt=Array.of(np.asarray([1], np.int32)), params=SamplingParams(max_tokens=1, seed=1)
)
ROWS = ImportRows(format="jsonl", splits={"train": '{"text": "a", "label": "b"}'})
VERSION = Version(Weights(version=BASE), BASE, "tiny")

ARE_NOT_FOUND: dict[str, list[Attempt]] = {
    "Cards.get": [lambda s, w: s.cards.get(STRANGER, w.version), lambda s, w: s.cards.get(STRANGER, w.deployment)],
    "Cards.measure": [lambda s, w: s.cards.measure(STRANGER, w.version), lambda s, w: s.cards.measure(STRANGER, w.sampler_path)],
    "Checkpoints.delete": [lambda s, w: s.checkpoints.delete(STRANGER, w.path)],
    "Checkpoints.find": [lambda s, w: s.checkpoints.find(STRANGER, w.path), lambda s, w: s.checkpoints.find(STRANGER, w.sampler_path)],
    "Checkpoints.named": [
        lambda s, w: s.checkpoints.named(STRANGER, w.run, NAMED, w.saved),
        lambda s, w: s.checkpoints.named(STRANGER, w.tinker_run, NAMED, w.saved),
    ],
    "Checkpoints.own": [lambda s, w: s.checkpoints.own(STRANGER, w.path)],
    "Checkpoints.set_ttl": [lambda s, w: s.checkpoints.set_ttl(STRANGER, w.path, 1)],
    "Curation.judged": [lambda s, w: s.datasets._curation.judged(STRANGER, Curate(parent="x", deployment=w.deployment))],
    "Datasets.curate": [
        lambda s, w: s.datasets.curate(STRANGER, w.dataset, Curate(parent=w.dataset_version)),
        lambda s, w: s.datasets.curate(STRANGER, "own", Curate(parent=w.dataset_version)),
    ],
    "Datasets.get": [lambda s, w: s.datasets.get(STRANGER, w.dataset)],
    "Datasets.import_rows": [
        lambda s, w: s.datasets.import_rows(STRANGER, w.dataset, ROWS),
        lambda s, w: s.datasets.import_rows(STRANGER, "own", ROWS.model_copy(update={"parent": w.dataset_version})),
        lambda s, w: s.datasets.import_rows(STRANGER, "own", ROWS.model_copy(update={"parent": w.manifest})),
    ],
    "Datasets.rows": [
        lambda s, w: s.datasets.rows(STRANGER, w.dataset, w.dataset_version, "train"),
        lambda s, w: s.datasets.rows(STRANGER, "own", w.dataset_version, "train"),
        lambda s, w: s.datasets.rows(STRANGER, "own", w.manifest, "train"),
    ],
    "Deployments.create": [
        lambda s, w: s.deployments.create(STRANGER, "mine", w.version, {}),
        lambda s, w: s.deployments.create(STRANGER, "mine", w.sampler_path, {}),
    ],
    "Deployments.get": [lambda s, w: s.deployments.get(STRANGER, w.deployment)],
    "Deployments.promote": [
        lambda s, w: s.deployments.promote(STRANGER, w.deployment, "tiny", {}),
        lambda s, w: s.deployments.promote(STRANGER, "own", w.version, {}),
    ],
    "Deployments.rollback": [lambda s, w: s.deployments.rollback(STRANGER, w.deployment, 1)],
    "Exports.file": [lambda s, w: s.exports.file(STRANGER, w.version, None, "adapter_config.json")],
    "Exports.lay_out": [lambda s, w: s.exports.lay_out(STRANGER, w.version, None), lambda s, w: s.exports.lay_out(STRANGER, w.sampler_path, None)],
    "External.offer": [lambda s, w: s.external.offer(STRANGER, w.run, w.exported), lambda s, w: s.external.offer(STRANGER, w.tinker_run, w.exported)],
    "Judgements.give": [
        lambda s, w: s.feedback.give(STRANGER, GiveFeedback(target=w.span, metric="m", value=True)),
        lambda s, w: s.feedback.give(STRANGER, GiveFeedback(target=w.episode, metric="m", value=True)),
        lambda s, w: s.feedback.give(STRANGER, GiveFeedback(target="own-span", metric="m", value=w.span, type="preference")),
    ],
    "Publishing.publish": [lambda s, w: s.publishing.publish(STRANGER, w.path)],
    "Publishing.unpublish": [lambda s, w: s.publishing.unpublish(STRANGER, w.path)],
    "Runs.checkpoint": [lambda s, w: s.runs.checkpoint(STRANGER, w.run, 9, "x"), lambda s, w: s.runs.checkpoint(STRANGER, w.tinker_run, 9, "x")],
    "Runs.get": [lambda s, w: s.runs.get(STRANGER, w.run), lambda s, w: s.runs.get(STRANGER, w.tinker_run)],
    "Runs.load": [lambda s, w: load_into_own(s, w)],
    "Runs.note_arriving": [lambda s, w: s.runs.note_arriving(STRANGER, w.run), lambda s, w: s.runs.note_arriving(STRANGER, w.tinker_run)],
    "Runs.result": [lambda s, w: s.runs.result(STRANGER, w.run, 1, 0), lambda s, w: s.runs.result(STRANGER, w.tinker_run, 1, 0)],
    "Runs.snapshot": [lambda s, w: s.runs.snapshot(STRANGER, w.run, 9), lambda s, w: s.runs.snapshot(STRANGER, w.tinker_run, 9)],
    "Runs.submit": [
        lambda s, w: s.runs.submit(STRANGER, w.run, 9, operation(9)),
        lambda s, w: s.runs.submit(STRANGER, w.tinker_run, 9, operation(9)),
    ],
    "Runs.unload": [lambda s, w: s.runs.unload(STRANGER, w.run)],
    "Runs.waiting_for": [lambda s, w: s.runs.waiting_for(STRANGER, w.run), lambda s, w: s.runs.waiting_for(STRANGER, w.tinker_run)],
    "Sampling.resolve": [
        lambda s, w: s.sampling.resolve(STRANGER, w.deployment),
        lambda s, w: s.sampling.resolve(STRANGER, w.version),
        lambda s, w: s.sampling.resolve(STRANGER, w.sampler_path),
    ],
    "Sessions.create_sampling": [lambda s, w: s.sessions.create_sampling(STRANGER, w.session, 1, VERSION, None)],
    "Sessions.finish": [lambda s, w: s.sessions.finish(STRANGER, w.session, "stolen")],
    "Sessions.follow": [lambda s, w: s.sessions.follow(STRANGER, w.session, 1, VERSION, run_id=w.run, saved=4)],
    "Sessions.get": [lambda s, w: s.sessions.get(STRANGER, w.session)],
    "Sessions.get_sampling": [lambda s, w: s.sessions.get_sampling(STRANGER, w.sampler)],
    "Sessions.heartbeat": [lambda s, w: s.sessions.heartbeat(STRANGER, w.session)],
    "Sessions.join_sampling": [lambda s, w: s.sessions.join_sampling(STRANGER, w.sampler)],
    "Sessions.require_open": [lambda s, w: s.sessions.require_open(STRANGER, w.session)],
    "Traffic.body": [lambda s, w: s.traffic.body(STRANGER, w.span)],
    "Traffic.get": [lambda s, w: s.traffic.get(STRANGER, w.span)],
    "Versions.find": [lambda s, w: s.versions.find(STRANGER, w.version), lambda s, w: s.versions.find(STRANGER, w.sampler_path)],
}
"""What names a thing; asked for another project's, the answer is word for word that for a thing that is not there."""
SHOW_ONES_OWN: dict[str, Attempt] = {
    "Audit.entries": lambda s, w: s.audit.entries(STRANGER, since_us=0, until_us=1 << 60, about=None),
    "Audit.storage": lambda s, w: s.audit.storage(STRANGER),
    "Auth.list": lambda s, w: s.auth.list(STRANGER),
    "Checkpoints.latest": lambda s, w: s.checkpoints.latest(STRANGER, [w.run]),
    "Checkpoints.list": lambda s, w: s.checkpoints.list(STRANGER, run_id=w.run),
    "Checkpoints.name_at": lambda s, w: s.checkpoints.name_at(STRANGER, w.run, NAMED, 3),
    "Datasets.list": lambda s, w: s.datasets.list(STRANGER),
    "Deployments.list": lambda s, w: s.deployments.list(STRANGER),
    "Deployments.live_version": lambda s, w: s.deployments.live_version(STRANGER, w.deployment),
    "Deployments.names": lambda s, w: s.deployments.names(STRANGER),
    "Deployments.target": lambda s, w: s.deployments.target(STRANGER, w.deployment),
    "Judgements.list": lambda s, w: s.feedback.list(STRANGER, target=w.span),
    "RunMetricsReader.series": lambda s, w: s.run_metrics.series(STRANGER, w.run),
    "Runs.list": lambda s, w: s.runs.list(STRANGER),
    "Sampling.served": lambda s, w: s.sampling.served(STRANGER),
    "SessionSearch.find": lambda s, w: s.session_search.find(STRANGER, SessionFilter(), behind=None, limit=100),
    "Sessions.list": lambda s, w: s.sessions.list(STRANGER, limit=100, offset=0),
    "Sessions.run_names": lambda s, w: s.sessions.run_names(STRANGER, w.session),
    "Sessions.samplers": lambda s, w: s.sessions.samplers(STRANGER, w.session),
    "Traffic.list": lambda s, w: s.traffic.list(STRANGER, deployment=w.deployment, episode=w.episode),
}
"""What lists: nothing of another project's is in it, whatever it is asked for."""
HAVE_TESTS_OF_THEIR_OWN = {
    # tests/services/access/test_auth.py: an admin changes keys of its own project alone.
    "Auth.create",
    "Auth.revoke",
    # tests/services/clients/test_custom_losses.py: a loss belongs to a project.
    "CustomLosses.attach",
    "CustomLosses.create",
    "CustomLosses.get",
    # They make things of the caller's own, below.
    "Datasets.create",
    "Runs.create",
    "Sessions.create",
    # It is for the whole server, below.
    "Garbage.collect",
    # Base models are everybody's.
    "Models.list",
    # They take what `Checkpoints.find` and `Sampling.resolve` found.
    "Publishing.copy",
    "Sampling.stream",
}


def test_every_verb_is_in_the_tables() -> None:
    assert set(verbs()) - OF_THE_KEY_ITSELF == set(SCOPES_OF)
    named = [*ARE_NOT_FOUND, *SHOW_ONES_OWN, *HAVE_TESTS_OF_THEIR_OWN]
    assert sorted(named) == sorted(SCOPES_OF)


def test_what_does_not_ask_who_calls_is_not_for_callers() -> None:
    kinds = {kind for kind in get_type_hints(Services).values() if inspect.isclass(kind) and kind.__module__.startswith(package.__name__)}
    silent = {kind.__name__: {name for name, method in methods(kind) if "p" not in inspect.signature(method).parameters} for kind in kinds}
    assert {kind: names for kind, names in silent.items() if names} == NOT_ASKED_BY_CALLERS


@pytest.mark.parametrize("verb", sorted(SCOPES_OF))
def test_a_verb_asks_for_its_scope_before_it_does_anything(verb: str) -> None:
    allowed = set(SCOPES_OF[verb].split())
    refused = {scope for scope in SCOPES if refuses(verb, frozenset({scope}))}
    assert refused == SCOPES - allowed
    assert refuses(verb, SCOPES - allowed)


def test_nothing_of_one_project_is_shown_to_another(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with Services.open(config(tmp_path)) as services:
            world, nothing = await populate(services), World(*(f"nothing-{field}" for field in World._fields))
            before = await everything(services, world)
            for verb, attempts in ARE_NOT_FOUND.items():
                for number, attempt in enumerate(attempts):
                    theirs, nobodys = await refusal(attempt, services, world), await refusal(attempt, services, nothing)
                    assert theirs == nobodys, f"{verb} {number}"
            for verb, attempt in SHOW_ONES_OWN.items():
                shown = repr(await attempt(services, world))
                assert [name for name, value in world._asdict().items() if value in shown] == [], verb
                assert shown == repr(await attempt(services, nothing)), verb
            assert await everything(services, world) == before
            assert [message.run_id for message in engine.executed] == [world.run] * 5

    play(tmp_path, story)


def test_the_same_names_in_two_projects_are_two_things(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with Services.open(config(tmp_path)) as services:
            world = await populate(services)
            theirs = await services.runs.create(STRANGER, base_model="tiny", lora=LORA, metadata={}, tinker_id=world.tinker_run)
            assert theirs.id != world.run
            assert (await services.runs.get(STRANGER, world.tinker_run)).id == theirs.id
            await services.runs.submit(STRANGER, world.tinker_run, 1, operation(1))
            assert (await services.runs.get(ME, world.tinker_run)).id == world.run
            await services.runs.submit(ME, world.tinker_run, 6, operation(6))
            assert await services.runs.result(ME, world.tinker_run, 6, 20) is not None
            assert await services.runs.result(STRANGER, world.tinker_run, 1, 20) is not None
            assert (await services.datasets.create(STRANGER, world.dataset)).versions == []
            assert (await services.deployments.create(STRANGER, world.deployment, "tiny", {})).live.version == BASE
            assert (await services.sampling.resolve(STRANGER, world.deployment)).weights.version == BASE
            assert (await services.sampling.resolve(ME, world.deployment)).weights.version == world.version

    play(tmp_path, story)


def test_what_is_published_can_be_read_everywhere_and_changed_at_home_only(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with Services.open(config(tmp_path)) as services:
            world = await populate(services)
            await services.publishing.publish(ME, world.path)
            found = await services.checkpoints.find(STRANGER, world.path)
            assert (found.run_id, found.base_model) == (world.run, "tiny")
            own = await services.runs.create(STRANGER, base_model="tiny", lora=LORA, metadata={}, begins_with_load=True)
            await services.runs.load(STRANGER, own.id, 0, found, optimizer=True)
            assert await services.runs.result(STRANGER, own.id, 0, 20) is not None
            for change in (
                services.checkpoints.delete(STRANGER, world.path),
                services.checkpoints.set_ttl(STRANGER, world.path, 1),
                services.publishing.unpublish(STRANGER, world.path),
            ):
                with pytest.raises(NotFound):
                    await change
            for hidden in (services.runs.get(STRANGER, world.run), services.checkpoints.find(STRANGER, world.sampler_path)):
                with pytest.raises(NotFound):
                    await hidden
            assert (await services.checkpoints.list(STRANGER)).total == 0
            await services.publishing.unpublish(ME, world.path)
            with pytest.raises(NotFound):
                await services.checkpoints.find(STRANGER, world.path)

    play(tmp_path, story)


def test_garbage_is_collected_by_who_administers_the_server(tmp_path: Path) -> None:
    async def story(engine: FakeEngine) -> None:
        async with Services.open(config(tmp_path)) as services:
            with pytest.raises(Forbidden, match="project `other` alone"):
                await services.garbage.collect(STRANGER)
            assert (await services.garbage.collect(ME)).spans == 0

    play(tmp_path, story)


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public ones of a class."""
    return ((name, method) for name, method in vars(kind).items() if not name.startswith("_") and inspect.isfunction(method))


def verbs() -> dict[str, tuple[type, Callable[..., Any]]]:
    """Every public method of a service that is told who calls."""
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    kinds = {kind for module in modules for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__}
    return {
        f"{kind.__name__}.{name}": (kind, method) for kind in kinds for name, method in methods(kind) if "p" in inspect.signature(method).parameters
    }


def refuses(verb: str, scopes: frozenset[str]) -> bool:
    """Whether the verb of an object that has nothing is Forbidden: whatever it does before it asks for a scope fails in another way."""
    kind, method = verbs()[verb]
    wanted = [parameter for parameter in inspect.signature(method).parameters.values() if parameter.default is parameter.empty][2:]
    given = {parameter.name: None for parameter in wanted}
    caller = Principal("default", "key-1", scopes)

    async def call() -> None:
        done = method(object.__new__(kind), caller, **given)
        if inspect.isawaitable(done):
            await done

    try:
        asyncio.run(call())
    except Forbidden:
        return True
    except Exception:
        return False
    raise AssertionError(f"{verb} did something without anything")


async def populate(services: Services) -> World:
    """One of everything in the default project, and what the stranger tries it with in the other."""
    session = await services.sessions.create(ME, tags=[], user_metadata={}, sdk_version="0")
    name = f"{session.id}:train:0"
    run = await services.runs.create(ME, base_model="tiny", lora=LORA, metadata={}, session_id=session.id, tinker_id=name)
    for seq in (1, 2):
        await services.runs.submit(ME, run.id, seq, operation(seq))
    await services.runs.checkpoint(ME, run.id, 3, "kept-by-default")
    await services.runs.snapshot(ME, run.id, 4, "served-by-default")
    await services.runs.snapshot(ME, run.id, 5, "exported-by-default", kind=EXTERNAL)
    assert isinstance(await services.runs.result(ME, run.id, 3, 20), CheckpointResult)
    assert isinstance(await services.runs.result(ME, run.id, 5, 20), SnapshotResult)
    snapshot = await services.runs.result(ME, run.id, 4, 20)
    assert isinstance(snapshot, SnapshotResult)
    version = await services.versions.find(ME, snapshot.version)
    sampler = await services.sessions.create_sampling(ME, session.id, 0, version, None)
    await services.deployments.create(ME, "deployed-by-default", snapshot.version, {"why": "evidence-of-default"})
    await services.datasets.create(ME, "data-of-default")
    data = await services.datasets.import_rows(ME, "data-of-default", ROWS)
    services.traffic.record(chat("span-of-default", episode_id="episode-of-default"))
    await services.feedback.give(ME, GiveFeedback(target="span-of-default", metric="m", value=True))
    await services.deployments.create(STRANGER, "own", "tiny", {})
    await services.datasets.create(STRANGER, "own")
    services.traffic.record(chat("own-span", project=STRANGER.project))
    return World(
        run=run.id,
        tinker_run=name,
        session=session.id,
        sampler=sampler.id,
        saved="kept-by-default",
        published="served-by-default",
        exported="exported-by-default",
        version=snapshot.version,
        deployment="deployed-by-default",
        dataset="data-of-default",
        dataset_version=data.id,
        manifest=data.manifest,
        span="span-of-default",
        episode="episode-of-default",
    )


async def refusal(attempt: Attempt, services: Services, world: World) -> str:
    """What the attempt is told, with the world's names replaced by what they are names of."""
    with pytest.raises(NotFound) as refused:
        await attempt(services, world)
    said = f"{refused.value.message} ({refused.value.field})"
    for field, value in sorted(world._asdict().items(), key=lambda item: -len(item[1])):
        said = said.replace(value, f"<{field}>")
    return said.replace("<tinker_run>", "<run>")


async def everything(services: Services, world: World) -> list[Any]:
    """The things of the default project as their owner sees them."""
    session: Session = await services.sessions.get(ME, world.session)
    return [
        (await services.runs.get(ME, world.run))._replace(updated_us=0),
        await services.checkpoints.list(ME),
        session,
        await services.sessions.samplers(ME, world.session),
        await services.deployments.get(ME, world.deployment),
        await services.datasets.get(ME, world.dataset),
        await services.traffic.get(ME, world.span),
        await services.feedback.list(ME),
    ]


async def load_into_own(services: Services, world: World) -> None:
    """Begin a run of one's own with weights of somebody's."""
    run = await services.runs.create(STRANGER, base_model="tiny", lora=LORA, metadata={}, begins_with_load=True)
    await services.runs.load(STRANGER, run.id, 0, await services.checkpoints.find(STRANGER, world.path), optimizer=True)


def config(directory: Path) -> ApiConfig:
    (directory / "api_key").write_text("tml-development-key\n")
    return ApiConfig(data_dir=str(directory), host="127.0.0.1", port=0, record="full", models=(fake_base(directory),))
