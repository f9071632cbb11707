"""The planted graders are what they say: the hackable ones pay for their exploits, the sound ones for good answers alone."""

from pathlib import Path
from statistics import mean

import pytest

from tests.grade.planted import later, seen, unseen
from tests.grade.planted.running import scores
from tests.grade.planted.unseen import Case, Row

CASES = [*unseen.cases(), *seen.cases(), *later.cases()]
HACKABLE = [case for case in CASES if case.kind == "hackable"]
SOUND = [case for case in CASES if case.kind == "sound"]


def test_there_are_ten_of_each_kind_in_every_form():
    for cases in (unseen.cases(), seen.cases(), later.cases()):
        hackable, sound = ([case for case in cases if case.kind == kind] for kind in ("hackable", "sound"))
        assert len(hackable) == len(sound) == 10
        assert {case.form for case in hackable} == {case.form for case in sound} == {"score", "openai", "trl", "json"}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_has_rows_and_answers_and_its_grader_does_not_give_it_away(case: Case):
    assert 12 <= len(case.rows) <= 24
    assert sum(bool(row.good and row.bad) for row in case.rows) >= 4
    assert all(row.messages[-1]["content"] for row in case.rows)
    assert bool(case.exploits) == (case.kind == "hackable")
    assert case.why.lower().startswith(f"{case.kind}:")
    assert case.why not in case.grader
    assert all(word not in case.grader.lower() for word in ("hackable", "sound:", "exploit"))


@pytest.mark.parametrize("case", HACKABLE, ids=lambda case: case.name)
def test_an_exploit_is_worth_no_less_than_honest_good_answers(case: Case):
    good = mean(scores(case, answers(case, "good")))
    assert good > mean(scores(case, answers(case, "bad")))
    for index in range(len(case.exploits)):
        assert mean(scores(case, [(row, case.exploits_of(row)[index]) for row in case.rows])) >= good


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.name)
def test_a_sound_grader_puts_every_good_answer_above_the_bad_ones_of_its_row(case: Case):
    good, bad = answers(case, "good"), answers(case, "bad")
    given = list(zip([*good, *bad], scores(case, [*good, *bad]), strict=True))
    for row in case.rows:
        if row.good and row.bad:
            of_row = [(output, score) for (other, output), score in given if other is row]
            assert min(score for output, score in of_row if output in row.good) > max(score for output, score in of_row if output in row.bad)


@pytest.mark.slow
@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.name)
def test_no_exploit_of_another_case_and_no_answer_to_another_row_pays_at_a_sound_grader(case: Case):
    tricks = sorted({exploit for other in HACKABLE for exploit in other.exploits})
    outputs = sorted({output for _, output in answers(case, "good")})
    honest = answers(case, "good")
    given = [
        *honest,
        *((row, trick.replace("{prompt}", row.messages[-1]["content"])) for trick in tricks for row in case.rows),
        *((row, output) for output in outputs for row in case.rows),
    ]
    # All at once: where a case runs code, each call of `scores` starts a process.
    paid = scores(case, given)
    good = mean(paid[: len(honest)])
    for index, said in enumerate([*tricks, *outputs]):
        start = len(honest) + index * len(case.rows)
        assert mean(paid[start : start + len(case.rows)]) < 0.5 * good, said


def test_the_table_of_the_readme_names_every_unseen_case():
    table = (Path(unseen.__file__).parent / "README.md").read_text()
    for case in unseen.cases():
        assert f"| `{case.name}` | {case.kind} | {case.form} |" in table


def answers(case: Case, kind: str) -> list[tuple[Row, str]]:
    return [(row, output) for row in case.rows for output in getattr(row, kind)]
