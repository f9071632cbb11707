"""Which answers a result keeps, and how much of them."""

import json

import pytest
from pydantic import ValidationError

from bloomery.jobs.comparison import Answers
from bloomery.jobs.reinforced import HeldOutGroups, replies
from bloomery.jobs.rows import Question, Words
from bloomery.jobs.samples import Answered, Reply, answered, telling
from bloomery.recipes.agents import rollout_of
from bloomery.recipes.rollouts import Graded, Group, Problem, Rollout
from bloomery.recipes.segments import Turn
from bloomery.render import ChatTokenizer
from bloomery.types.jobs import MAX_SAMPLE_CHARS, MAX_SAMPLES, JobResult, JobSample
from tests.render.builders import chatml_directory

LONG = "x" * (MAX_SAMPLE_CHARS + 1)


def given(row: int, before: str = "a", after: str = "a", rewards: tuple[float | None, float | None] = (None, None)) -> Answered:
    return Answered(Words(row, f"question {row}"), Reply(before, rewards[0]), Reply(after, rewards[1]))


def rows_of(samples: list[JobSample]) -> list[int]:
    return [sample.row for sample in samples]


def test_rows_that_are_answered_otherwise_come_first_and_all_in_their_order() -> None:
    found = [given(0), given(1, after="b"), given(2), given(3, after="c")]
    assert rows_of(telling(found)) == rows_of(telling(reversed(found))) == [1, 3, 0, 2]
    # Draws are other ones nearly always: what they are worth says more.
    rewarded = [given(0, after="b", rewards=(1.0, 1.0)), given(1, rewards=(0.0, 0.0)), given(2, after="b", rewards=(0.0, 1.0))]
    assert rows_of(telling(rewarded)) == [2, 0, 1]


def test_so_many_are_kept_and_none_that_changed_is_left_out_for_one_that_did_not() -> None:
    found = [given(row, after="b" if row >= 10 else "a") for row in range(10 + MAX_SAMPLES)]
    assert rows_of(telling(found)) == list(range(10, 10 + MAX_SAMPLES))
    assert telling([]) == []


def test_a_text_is_cut_behind_its_most_characters_and_that_is_said() -> None:
    whole, longer = LONG[:-1], LONG
    (sample,) = telling([Answered(Words(0, longer, whole, longer), Reply(whole), Reply(longer))])
    assert (sample.asked, sample.reference, sample.rejected, sample.before, sample.after) == (whole,) * 5
    assert sample.cut == ["asked", "rejected", "after"]
    # What is cut off counts where rows are chosen.
    assert rows_of(telling([given(0), given(1, longer + "a", longer + "b")])) == [1, 0]


def test_answers_stand_beside_their_questions() -> None:
    asked = [Question([1], Words(0, "one?", "one")), Question([2], Words(1, "two?"))]
    first, second = telling(answered(asked, Answers(["a", "b"], ["one", "b"])))
    assert (first.row, first.asked, first.reference, first.before, first.after) == (0, "one?", "one", "a", "one")
    assert (second.row, second.asked, second.reference, second.before, second.after) == (1, "two?", None, "b", "b")


def test_a_result_holds_no_more_than_is_kept_and_one_of_before_has_none() -> None:
    known = {"run": "r", "version": "v", "checkpoint": "final", "step": 1, "digest": "d", "compared": [], "base_version": "tiny"}
    assert JobResult.model_validate_json(json.dumps(known)).samples is None
    kept = {"row": 0, "asked": "a", "before": "b", "after": "c"}
    assert (
        JobResult.model_validate(known | {"samples": [kept] * MAX_SAMPLES}).samples
        == [JobSample(row=0, asked="a", before="b", after="c")] * MAX_SAMPLES
    )
    for wrong in ([kept] * (MAX_SAMPLES + 1), [kept | {"after": LONG}], [kept | {"cut": ["row"]}]):
        with pytest.raises(ValidationError):
            JobResult.model_validate(known | {"samples": wrong})


@pytest.fixture
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(chatml_directory(tmp_path_factory.mktemp("tokenizer")))


PROBLEM = Problem("eval-1", (5, 6))


def graded(rollout: Rollout, reward: float) -> Graded:
    return Graded(rollout, reward, {})


def drawn(tokenizer: ChatTokenizer, number: int, text: str) -> Rollout:
    tokens = (*tokenizer.encode(text), tokenizer.end_tokens[0])
    return Rollout(f"0.{number}", PROBLEM, tokens, (0.0,) * len(tokens), ("v",) * len(tokens), stopped=True)


def test_of_a_prompt_the_first_draw_that_both_have_a_reward_of_is_kept_with_it(tokenizer: ChatTokenizer) -> None:
    before = Group(0, PROBLEM, tuple(graded(drawn(tokenizer, number, f"old {number}"), number / 4) for number in (0, 1, 3)), ())
    after = Group(0, PROBLEM, tuple(graded(drawn(tokenizer, number, f"new {number}"), number / 2) for number in (1, 2, 3)), ())
    lost = Group(1, PROBLEM, (), ())
    words = {PROBLEM.id: Words(0, "What?")}
    (only,) = replies(HeldOutGroups([before, lost], [after, after]), words, tokenizer)
    assert only == Answered(words[PROBLEM.id], Reply("old 1", 0.25), Reply("new 1", 0.5))


def test_of_an_agent_its_last_answer_is_kept(tokenizer: ChatTokenizer) -> None:
    def agent(*said: str) -> Group:
        turns, prompt = [], PROBLEM.prompt
        for number, text in enumerate(said):
            tokens = (*tokenizer.encode(text), tokenizer.end_tokens[0])
            turns.append(Turn(f"turn-{number}", prompt, tokens, (0.0,) * len(tokens), "v", stopped=True))
            prompt = (*prompt, *tokens, *tokenizer.encode("go on"))
        return Group(0, PROBLEM, (graded(rollout_of("0.0", PROBLEM, turns), 1.0),), ())

    words = {PROBLEM.id: Words(0, "What?")}
    (only,) = replies(HeldOutGroups([agent("look", "look again", "it is 3")], [agent("it is 4")]), words, tokenizer)
    assert (only.before.text, only.after.text) == ("it is 3", "it is 4")
