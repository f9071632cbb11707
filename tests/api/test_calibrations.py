"""Judges measured by what people said, over HTTP to the real services; the judge's model is elsewhere, and says what the output asks it to."""

from collections.abc import Iterator
from typing import Any

import pytest

from bloomery.config import EndpointConfig
from bloomery.services.access.principal import SCOPES, Principal
from bloomery.types.errors import Conflict
from bloomery.types.graders import Calibration, ComparedPair, CreateGrader, LabelledRow
from tests.api.server import Server, serving
from tests.outside import KEY, outside

ME = Principal("default", "key", SCOPES)
ROUTE = [{"role": "user", "content": "{{ sample.output_text }}"}]
LABELS = {"type": "label_model", "name": "which", "model": "elsewhere:m", "labels": ["first", "second"], "passing_labels": ["first"], "input": ROUTE}
SCORES = {"type": "score_model", "name": "how", "model": "elsewhere:m", "range": [0, 10], "input": ROUTE}


def says(body: dict[str, Any]) -> Any:
    asked = str(body["messages"][-1]["content"])
    if asked == "no verdict":
        return 400
    return {"steps": [], "result": asked if asked.isalpha() else float(asked)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    (directory / "key").write_text(KEY)
    with outside(says) as elsewhere:
        endpoints = (EndpointConfig(name="elsewhere", base_url=elsewhere.url, key_file=str(directory / "key")),)
        with serving(directory, endpoints=endpoints) as running:
            for name, spec in (("which", LABELS), ("how", SCORES)):
                running.call(running.services.graders.create(ME, CreateGrader(name=name, spec=spec)))
            yield running


def labelled(*counts: tuple[str, bool | str, int], swapped: str | None = None) -> list[LabelledRow]:
    """So many rows of each: what the judge says, and what people say."""
    other = {} if swapped is None else {"swapped": {"output": swapped}}
    return [LabelledRow.model_validate({"output": says, "label": label, **other}) for says, label, count in counts for _ in range(count)]


def card(server: Server, name: str, rows: list[LabelledRow] | list[ComparedPair], **options: Any) -> Calibration:
    with server.client() as client:
        return client.graders.calibrate(name, rows, **options)


def may_gate(server: Server, name: str) -> str | None:
    """None, or why not."""

    async def ask() -> None:
        await server.services.calibrations.may_gate(ME, await server.services.graders.get(ME, name))

    try:
        server.call(ask())
    except Conflict as conflict:
        return conflict.message
    return None


def test_a_judge_that_agrees_with_people_may_gate_and_one_that_nobody_measured_may_not(server: Server) -> None:
    assert "nobody measured its judges" in (may_gate(server, "which") or "")
    assert "bloomery grader calibrate which labels.jsonl --version 1" in (may_gate(server, "which") or "")
    made = card(server, "which", labelled(("first", "first", 18), ("second", "first", 2), ("second", "second", 20)))
    assert (made.calibrated, made.why, made.rows, made.invalid) == (True, None, 40, 0)
    # Both agree in 38 of 40, and by chance in half of them.
    assert made.kappa == pytest.approx(0.9)
    assert made.kappa_low is not None
    assert made.kappa_high is not None
    assert 0.4 < made.kappa_low < 0.9 < made.kappa_high
    assert (made.true_positive_rate.hits, made.true_positive_rate.total) == (18, 20)
    assert (made.true_negative_rate.hits, made.true_negative_rate.total) == (20, 20)
    assert (made.agreement.hits, made.majority_baseline.hits, made.position_flips.value) == (38, 20, None)
    assert may_gate(server, "which") is None
    worse = card(server, "which", labelled(("first", "first", 10), ("second", "first", 10), ("second", "second", 10), ("first", "second", 10)))
    assert (worse.calibrated, worse.kappa) == (False, 0.0)
    assert f"its card {worse.id} is below the bar: kappa is 0.00" in (may_gate(server, "which") or "")
    with server.client() as client:
        assert client.graders.calibrations("which") == [worse, made]
        assert client.graders.run("which", labelled(("first", True, 1))).results[0].score == 1.0


def test_scores_pass_from_the_middle_of_their_range_or_a_threshold(server: Server) -> None:
    rows = labelled(("6", True, 10), ("4", False, 10))
    assert (card(server, "how", rows).threshold, card(server, "how", rows).kappa) == (5.0, 1.0)
    strict = card(server, "how", rows, threshold=7.0)
    assert (strict.threshold, strict.true_positive_rate.value, strict.calibrated) == (7.0, 0.0, False)


def test_few_labels_let_nobody_gate_however_well_the_judge_agrees(server: Server) -> None:
    few = card(server, "how", labelled(("9", True, 1), ("1", False, 1)))
    assert (few.kappa, few.agreement.hits, few.calibrated) == (1.0, 2, False)
    assert "its lower end must be above 0.4" in (few.why or "")
    assert card(server, "how", labelled(("9", True, 5), ("1", False, 5))).calibrated


def test_always_saying_what_is_commonest_is_no_skill(server: Server) -> None:
    made = card(server, "how", labelled(("9", True, 30), ("9", False, 2)))
    assert (made.kappa, made.agreement.hits, made.majority_baseline.hits, made.calibrated) == (0.0, 30, 30, False)
    alike = card(server, "how", labelled(("9", True, 30)))
    assert (alike.kappa, alike.calibrated) == (None, False)
    assert "shows nothing" in (alike.why or "")


def compared(*counts: tuple[str, str, str, int]) -> list[ComparedPair]:
    """So many pairs of each: what the judge gives both, and what people prefer."""
    return [
        ComparedPair.model_validate({"first": {"output": one}, "second": {"output": other}, "choice": choice})
        for one, other, choice, count in counts
        for _ in range(count)
    ]


def test_a_judge_whose_scores_order_pairs_as_people_do_may_gate(server: Server) -> None:
    server.call(server.services.graders.create(ME, CreateGrader(name="compares", spec=SCORES | {"range": [0, 12]})))
    made = card(
        server,
        "compares",
        compared(("9", "1", "first", 18), ("1", "9", "second", 16), ("9", "1", "second", 2), ("5", "5", "tie", 3), ("5", "4", "tie", 1)),
    )
    assert (made.calibrated, made.rows, made.invalid, made.threshold) == (True, 40, 0, None)
    assert (made.agreement.hits, made.agreement.total, made.majority_baseline.hits) == (37, 40, 18)
    assert made.pairs is not None
    assert (made.pairs.decided.hits, made.pairs.decided.total, made.pairs.people_first.hits, made.pairs.people_first.total) == (34, 36, 18, 36)
    assert (made.pairs.people_ties, made.pairs.grader_ties, made.pairs.both_ties) == (4, 3, 3)
    assert made.pairs.decided.low is not None
    assert made.pairs.decided.high is not None
    assert made.pairs.decided.low < 34 / 36 < made.pairs.decided.high
    assert (made.true_positive_rate.total, made.position_flips.total, made.pairs.grader_first.total) == (0, 0, 0)
    assert may_gate(server, "compares") is None
    loose = card(server, "compares", compared(("9", "1", "first", 10), ("5", "4", "tie", 10), ("no verdict", "1", "first", 1)), tie_within=1.0)
    assert (loose.kappa, loose.invalid) == (1.0, 1)
    with server.client() as client:
        assert client.graders.calibrations("compares")[:2] == [loose, made]


def test_a_card_of_rows_counts_whatever_pairs_were_compared_since(server: Server) -> None:
    server.call(server.services.graders.create(ME, CreateGrader(name="kinds", spec=SCORES | {"range": [0, 11]})))
    few = card(server, "kinds", compared(("9", "1", "first", 2), ("1", "9", "first", 1)))
    assert f"its card {few.id} is below the bar" in (may_gate(server, "kinds") or "")
    assert card(server, "kinds", labelled(("9", True, 20), ("1", False, 20))).calibrated
    assert not card(server, "kinds", compared(("9", "1", "first", 2), ("1", "9", "first", 1))).calibrated
    assert may_gate(server, "kinds") is None
    worse = card(server, "kinds", labelled(("9", True, 20), ("9", False, 20)))
    assert card(server, "kinds", compared(("9", "1", "first", 20), ("1", "9", "second", 20))).calibrated
    assert f"its card {worse.id} is below the bar" in (may_gate(server, "kinds") or "")


def test_a_judge_that_sees_both_answers_of_a_pair_shows_how_it_heeds_their_places(server: Server) -> None:
    seen = {
        **LABELS,
        "name": "both",
        "labels": ["one", "other"],
        "passing_labels": ["one"],
        "input": [{"role": "user", "content": "{{ item.first }}"}],
    }
    server.call(server.services.graders.create(ME, CreateGrader(name="both", spec=seen)))
    # It says what stands in the first place: `one` prefers that, `other` the second.
    pairs = compared(("one", "other", "first", 10), ("other", "one", "second", 10), ("one", "one", "first", 5))
    made = card(server, "both", pairs, verdicts={"one": "first", "other": "second"})
    assert (made.position_flips.hits, made.position_flips.total, made.agreement.hits) == (5, 25, 25)
    assert made.pairs is not None
    assert (made.pairs.grader_first.hits, made.pairs.grader_first.total) == (30, 50)


def test_a_card_is_of_outputs_or_of_pairs_and_takes_what_belongs_to_it(server: Server) -> None:
    pair = compared(("9", "1", "first", 2))
    bodies: list[tuple[dict[str, Any], str]] = [
        ({}, "a card is of `rows` or of `pairs`"),
        ({"pairs": [each.model_dump() for each in pair], "threshold": 0.5}, "`threshold` and `swaps` are of `rows`"),
        ({"rows": [{"output": "x", "label": True}] * 2, "tie_within": 0.5}, "`tie_within` and `verdicts` are of `pairs`"),
    ]
    for body, problem in bodies:
        answer = server.http.post("/api/v1/graders/how/calibrations", json=body)
        assert (answer.status_code, problem in answer.json()["error"]["message"]) == (400, True)


def test_rows_without_a_verdict_count_nowhere_and_too_many_are_below_the_bar(server: Server) -> None:
    made = card(server, "how", labelled(("9", True, 20), ("1", False, 20), ("no verdict", True, 4)))
    assert (made.invalid, made.agreement.total, made.calibrated) == (4, 40, True)
    made = card(server, "how", labelled(("9", True, 20), ("1", False, 20), ("no verdict", True, 5)))
    assert (made.calibrated, made.why) == (False, "5 of 45 rows have no verdict")
    assert card(server, "how", labelled(("no verdict", True, 3))).kappa is None


def test_a_judge_that_heeds_places_is_seen_to(server: Server) -> None:
    steady = labelled(("first", "first", 6), swapped="second") + labelled(("second", "second", 6), swapped="first")
    assert card(server, "which", steady).position_flips.hits == 0
    heeds = labelled(("first", "first", 6), swapped="first") + labelled(("second", "second", 6), swapped="first")
    flips = card(server, "which", heeds).position_flips
    assert (flips.hits, flips.total, flips.value) == (6, 12, 0.5)
    scores = labelled(("9", True, 4), swapped="1") + labelled(("9", True, 4), swapped="9")
    assert card(server, "how", scores).position_flips.hits == 4


@pytest.mark.parametrize(
    ("name", "body", "status", "field"),
    [
        ("which", {"rows": []}, 400, "rows"),
        ("which", {"rows": [{"output": "first", "label": "third"}] * 2}, 400, "rows"),
        ("which", {"rows": [{"output": "first", "label": "first"}, {"output": "first", "label": True}]}, 400, "rows"),
        ("how", {"rows": [{"output": "1", "label": "good"}] * 2}, 400, "rows"),
        ("which", {"rows": [{"output": "first", "label": "first"}] * 2, "swaps": {"first": "third"}}, 400, "swaps"),
        ("which", {"rows": [{"output": "first", "label": "first"}] * 2, "version": 9}, 404, "version"),
        ("none", {"rows": [{"output": "first", "label": True}] * 2}, 404, "name"),
    ],
)
def test_labels_that_make_no_sense_are_refused(server: Server, name: str, body: Any, status: int, field: str) -> None:
    answer = server.http.post(f"/api/v1/graders/{name}/calibrations", json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (status, field), answer.text


def test_a_card_is_of_a_version_and_graders_without_judges_always_gate(server: Server) -> None:
    card(server, "how", labelled(("9", True, 20), ("1", False, 20)))
    assert may_gate(server, "how") is None
    server.call(server.services.graders.create(ME, CreateGrader(name="how", spec=SCORES | {"range": [0, 20]})))
    assert may_gate(server, "how") is not None
    check = {"type": "string_check", "input": "{{ sample.output_text }}", "reference": "x", "operation": "eq"}
    server.call(server.services.graders.create(ME, CreateGrader(name="plain", spec=check)))
    assert may_gate(server, "plain") is None
    assert card(server, "plain", labelled(("x", True, 9), ("y", False, 9))).calibrated
