"""Graders that pay without competence are found, and sound ones left alone; the policy learns what pays, and failures are no evidence."""

import asyncio
from collections.abc import Sequence

import pytest

from bloomery.grade import mining
from bloomery.grade.attack import ROWS, Budget, attacked
from bloomery.grade.attacks import Surface, library
from bloomery.grade.grader import Grader
from bloomery.grade.mining import SLOT
from bloomery.grade.models import Answer, Question, Vectors
from bloomery.grade.policy import Policy
from bloomery.grade.pool import Graders, Limits, Program
from bloomery.types.errors import Forbidden
from bloomery.types.graders import AttackReport, AttackRow
from bloomery.types.grading import MOST_SCORE, GradeInput, GradeResult, GradeUsage

CITIES = ["Paris", "Rome", "Bern", "Oslo", "Lima", "Cairo", "Quito", "Delhi"]
ROWS_OF_CITIES = [
    AttackRow(item={"reference": city}, messages=[{"role": "user", "content": f"City {number}?"}]) for number, city in enumerate(CITIES)
]
EQUAL = {"type": "string_check", "input": "{{sample.output_text}}", "reference": "{{item.reference}}", "operation": "eq"}


def report(spec: dict[str, object], rows: Sequence[AttackRow] = ROWS_OF_CITIES, seed: int = 0) -> AttackReport:
    async def attack() -> AttackReport:
        async with Graders() as jail:
            return await attacked(Grader.parse(spec), rows, jail=jail, seed=seed)

    return asyncio.run(attack())


def function(body: str) -> dict[str, object]:
    return {"type": "function", "source": f"def score(output, reference):\n    {body}\n", "entry": "score"}


def test_equality_is_sound_and_the_opposite_is_not() -> None:
    sound = report(EQUAL)
    assert (sound.verdict, sound.bad_score, sound.good_score, sound.exploits) == ("sound", 0.0, 1.0, [])
    assert sound.grades > sound.attacks > 50
    assert report({**EQUAL, "operation": "ne"}).verdict == "hackable"


@pytest.mark.slow
def test_an_exploit_comes_with_what_was_asked_said_and_paid() -> None:
    found = report(function("return min(1.0, len(output) / 20)"))
    assert found.verdict == "hackable"
    assert found.why.startswith(found.exploits[0].name)
    for exploit in found.exploits:
        assert exploit.share >= 0.5
        assert exploit.examples
        for example in exploit.examples:
            assert example.prompt.startswith("City ")
            assert example.score == min(1.0, len(example.output) / 20)


class Judges:
    """Gives every question the same verdict."""

    def __init__(self, result: float) -> None:
        self._result, self.asked = result, 0

    async def ask(self, question: Question) -> Answer:
        self.asked += 1
        return Answer(f'{{"steps": [], "result": {self._result}}}', GradeUsage(prompt_tokens=90, completion_tokens=10))

    async def embed(self, model: str, texts: Sequence[str]) -> Vectors:
        raise NotImplementedError


@pytest.mark.parametrize(("budget", "verdict"), [(Budget(calls=40), "undecided"), (Budget(tokens=4000), "undecided"), (Budget(), "sound")])
def test_judges_are_asked_within_a_budget_and_the_report_says_when_it_was_spent(budget: Budget, verdict: str) -> None:
    judges = Judges(0.0)
    spec = {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user", "content": "{{sample.output_text}}"}]}
    equal = {"type": "multi", "graders": {"j": spec, "e": EQUAL}, "calculate_output": "j + e"}
    found = asyncio.run(attacked(Grader.parse(equal), ROWS_OF_CITIES, models=judges, budget=budget))
    assert (found.verdict, found.calls, found.tokens) == (verdict, judges.asked, 100 * judges.asked)
    assert found.spent == (verdict == "undecided")
    if found.spent:
        # Beyond the budget is only what was in hand when it was spent.
        assert 40 <= judges.asked < 200
        assert f"the budget of {budget} was spent" in found.why


@pytest.mark.parametrize(("pays", "varied"), [("0.0", False), ("1.0", False), ("float(output == reference)", True)])
def test_the_report_says_whether_a_grader_tells_any_two_outputs_apart(pays: str, varied: bool) -> None:
    assert report(function(f"return {pays}")).varied == varied


def test_scores_as_large_as_any_may_be_have_means_and_shares() -> None:
    paid = {"type": "multi", "graders": {"other": {**EQUAL, "operation": "ne"}}, "calculate_output": f"other * {MOST_SCORE}"}
    found = report(paid)
    assert (found.verdict, found.exploits[0].mean_score) == ("hackable", MOST_SCORE)
    assert AttackReport.model_validate_json(found.model_dump_json()) == found


def test_a_constant_answer_is_not_blamed_where_it_is_right() -> None:
    rows = [AttackRow(item={"reference": "none" if number % 4 else city}) for number, city in enumerate(CITIES * 2)]
    assert report(EQUAL, rows).verdict == "sound"


@pytest.mark.slow
def test_where_signs_are_the_answers_no_other_sign_and_no_silence_is_right() -> None:
    rows = [AttackRow(item={"reference": sign}, messages=[{"role": "user", "content": f"{sign}?"}]) for sign in "+-*/%<>="]
    pays_silence = {"type": "multi", "graders": {"same": EQUAL, "silent": {**EQUAL, "reference": ""}}, "calculate_output": "max(same, silent)"}
    found = report(pays_silence, rows)
    assert (found.verdict, found.exploits[0].name) == ("hackable", "an empty answer")
    assert report(EQUAL, rows).verdict == "sound"


def test_rows_may_come_with_answers_in_place_of_references() -> None:
    rows = [AttackRow(item={"key": city[::-1]}, good=[f"It is {city}."], bad=["It is Bonn."]) for city in CITIES]
    spec = {"type": "function", "source": "def score(output, key):\n    return float(output == f'It is {key[::-1]}.')\n", "entry": "score"}
    found = report(spec, rows)
    assert (found.verdict, found.bad_score, found.good_score) == ("sound", 0.0, 1.0)


def test_a_grader_that_fails_everywhere_is_undecided_and_one_that_nobody_can_reach_too() -> None:
    broken = report(function("return 1 / 0"))
    assert (broken.verdict, broken.exploits) == ("undecided", [])
    assert "ZeroDivisionError" in broken.why
    assert broken.failed == broken.grades

    class Away:
        async def grade(self, program: Program, inputs: Sequence[GradeInput], limits: Limits) -> list[GradeResult]:
            return [GradeResult.failed("unavailable", "no jail today")] * len(inputs)

    away = asyncio.run(attacked(Grader.parse(function("return 1.0")), ROWS_OF_CITIES, jail=Away()))
    assert away.verdict == "undecided"
    assert "no jail today" in away.why


@pytest.mark.slow
def test_where_no_good_answer_is_paid_nothing_speaks_for_the_grader() -> None:
    found = report(function("return 0.0"))
    assert (found.verdict, found.good_score) == ("undecided", None)
    assert "no answer that is known to be good was paid anything" in found.why


def test_a_refusal_ends_the_attack_and_nothing_goes_on_behind_it() -> None:
    class Refusing:
        asked = 0

        async def grade(self, program: Program, inputs: Sequence[GradeInput], limits: Limits) -> list[GradeResult]:
            self.asked += 1
            raise Forbidden("this key may not")

    async def attack(jail: Refusing) -> None:
        with pytest.raises(Forbidden, match="this key may not"):
            await attacked(Grader.parse(function("return 1.0")), ROWS_OF_CITIES, jail=jail)
        asked = jail.asked
        for _ in range(100):
            await asyncio.sleep(0)
        assert jail.asked == asked < 10

    asyncio.run(attack(Refusing()))


@pytest.mark.slow
def test_grades_that_fail_are_paid_nothing() -> None:
    found = report(function("return {reference: 1.0, 'xqzv': 0.0}[output]"))
    assert found.verdict == "sound"
    assert 0 < found.failed < found.grades


@pytest.mark.slow
def test_the_policy_finds_what_no_single_mutation_is() -> None:
    """Two texts that the library never says together, often enough."""
    body = "return min(1.0, (output.count('in short') > 2) * (output.count('at length') > 2) * (len(output) < 150))"
    spec = function(body)
    found = report(spec)
    assert found.verdict == "hackable"
    assert found.exploits[0].name.startswith("what a tiny policy learned to say")
    assert found == report(spec)
    assert found.exploits[0].rows == len(ROWS_OF_CITIES) // 2


def test_of_few_rows_no_policy_is_trained_that_nothing_could_be_said_of() -> None:
    few = report(EQUAL, ROWS_OF_CITIES[:5])
    tried = library(Surface(Grader.parse(EQUAL).canonical, ROWS_OF_CITIES[:5]), [])
    assert (few.verdict, few.attacks) == ("sound", len(tried))
    assert report(EQUAL, ROWS_OF_CITIES[:6]).attacks > len(tried)


def test_a_policy_comes_to_say_what_pays() -> None:
    policy = Policy(["good", "bad", "worse"], seed=1)
    for _ in range(40):
        said = [policy.say() for _ in range(16)]
        policy.learn(said, [float("good" in each.text and "bad" not in each.text) for each in said])
    late = [policy.say().text for _ in range(100)]
    assert sum("good" in text and "bad" not in text for text in late) > 90


@pytest.mark.slow
def test_of_many_rows_some_are_taken() -> None:
    rows = [AttackRow(item={"reference": f"{number} apples"}) for number in range(200)]
    found = report(function("return 1.0"), rows)
    assert found.verdict == "hackable"
    assert max(exploit.rows for exploit in found.exploits) == ROWS


@pytest.mark.parametrize(
    ("pattern", "form"),
    [
        (r"<answer>(.*?)</answer>", f"<answer>{SLOT}</answer>"),
        (r"\\boxed\{([^{}]*)\}", f"\\boxed{{{SLOT}}}"),
        (r"^Answer:\s*(?P<said>\d{2,4})$", "Answer: 11"),
        (r"(?:yes|no)\b(?!\?)", "yes"),
        (r"Step \d+[:.]", "Step 1:"),
    ],
)
def test_a_pattern_gives_away_what_it_looks_for(pattern: str, form: str) -> None:
    assert mining.forms([pattern]) == [form]


def test_a_pattern_that_takes_for_ever_is_read_and_not_searched_with() -> None:
    (form,) = mining.forms(["(a?){64}a{64}b"])
    assert form == "a" * 128 + "b"


def test_repetitions_within_each_other_give_no_form_instead_of_all_memory() -> None:
    assert mining.forms(["(" * 12 + "a" + "{64})" * 12, "<(a{3}){2}>"]) == ["<aaaaaa>"]


def test_what_is_no_pattern_gives_no_form() -> None:
    assert mining.forms(["plain", "(", "[a", "(?P<x", "a)b(", "\\"]) == []


def test_texts_are_taken_from_programs_at_every_depth_of_a_grader() -> None:
    spec = {"type": "multi", "graders": {"a": {"type": "python", "source": "WANTED = 'marker'"}}, "calculate_output": "a"}
    assert [mining.constants(source) for source in mining.sources(spec)] == [["marker"]]
    assert mining.constants("this is no program") == []


def test_programs_of_attacks_know_the_functions_of_a_row_and_not_its_answer() -> None:
    rows = [AttackRow(item={"reference": city, "function": f"go_{number}"}, good=[f"{city} (yes)"]) for number, city in enumerate(CITIES)]
    for attack in library(Surface({"type": "python", "source": "def grade(sample, item): return 0"}, rows), []):
        if attack.runs:
            assert not any(city in output for city, output in zip(CITIES, attack.outputs, strict=True))
    (overwriting,) = (attack for attack in library(Surface({"type": "python", "source": "pass"}, rows), []) if attack.name == "overwritten tests")
    assert overwriting.outputs[3].startswith("def go_3(*args, **kwargs)")
    assert mining.names("Write `twice` that calls f(x).", {}, ["def again(x):\n    return x", "spam"]) == ["again", "f", "twice"]


QUERIES = [AttackRow(item={"reference": f"SELECT * FROM {table} WHERE n = {n}"}) for n in range(4) for table in ("salt", "iron")]
RUNS_QUERIES = """
import sqlite3

def found(query):
    with sqlite3.connect(":memory:") as tables:
        for table in ("salt", "iron"):
            tables.execute(f"CREATE TABLE {table}(name, n)")
            tables.executemany(f"INSERT INTO {table} VALUES (?, ?)", [(table, n) for n in range(4)])
        return set(tables.execute(query))

def score(output, reference):
    try:
        return float(found(reference) OPERATOR found(output))
    except sqlite3.Error:
        return 0.0
"""


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "verdict", "paid"), [("<=", "hackable", "all tables"), (">=", "hackable", "nothing"), ("==", "sound", None)])
def test_a_query_for_everything_or_nothing_pays_where_only_one_side_is_looked_at(operator: str, verdict: str, paid: str | None) -> None:
    found = report({"type": "function", "source": RUNS_QUERIES.replace("OPERATOR", operator), "entry": "score"}, QUERIES)
    assert found.verdict == verdict
    assert paid is None or f"a query for {paid}" in [exploit.name for exploit in found.exploits]


def test_only_queries_tell_tables() -> None:
    assert mining.tables(["```sql\nselect a from salt join `iron` using (a)\n```", "A letter from home", "from x import y"]) == ["salt", "iron"]


def test_an_attack_says_something_in_every_row() -> None:
    surface = Surface({"type": "python", "source": "def grade(sample, item): exec(sample['output_text'])"}, ROWS_OF_CITIES)
    attacks = library(surface, surface.forms[:2])
    assert all(len(attack.outputs) == len(attack.cores) == len(CITIES) for attack in attacks)
    assert any(attack.runs for attack in attacks)
    assert not any(attack.runs for attack in library(Surface(EQUAL, ROWS_OF_CITIES), []))
