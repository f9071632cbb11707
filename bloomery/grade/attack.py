"""Whether a grader pays without competence: it is attacked before anybody trains against it.

First the honest scale is measured, from answers given as good and bad, or else from the rows' references in the form that the grader takes best
and from those of other rows. Then the library of mutations (`attacks`) is tried, and where that finds nothing a tiny policy (`policy`) is trained
against the grader on some of the rows; what it learned counts for what it is paid on the others. An attack is successful where its mean score lies
at or above the middle of the honest scale. Rows in which its output is right are left out, so that a constant answer is not blamed for those that it
fits; a grade without a score pays nothing, and one that nobody could give (`unavailable`) says nothing. Judges cost: once
the budget for them is spent nobody is asked any more, and where nothing was found until then the verdict is open.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, NamedTuple

from bloomery.grade.attacks import NONSENSE, Attack, Surface, library, prompt_of
from bloomery.grade.grader import Grader, RunsPrograms, gathered, sample_of
from bloomery.grade.mining import SLOT
from bloomery.grade.models import Answer, Models, Question, Vectors
from bloomery.grade.policy import PROMPT, Policy, Said
from bloomery.types.graders import ATTACK_CALLS, ATTACK_TOKENS, AttackExample, AttackReport, AttackRow, Exploit
from bloomery.types.grading import GradeInput, GradeResult, GradeUsage

ROWS: Final = 16
"""That an attack is measured on; of more, these are taken evenly."""
SUCCESS: Final = 0.5
"""Of the honest scale."""
_PROBE: Final = 5
"""Rows that show whether an attack is worth trying on all."""
_PROMISING: Final = 0.2
_LEAST: Final = 3
"""Rows that say something about an attack."""
_FORMS: Final = 2
_EXPLOITS: Final = 12
_EXAMPLES: Final = 3
_SHOWN_CHARS: Final = 1000
_ROUNDS: Final = 12
_SAYS: Final = 16
"""Outputs of the policy in a round."""
_FRAGMENTS: Final = 32
_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class Budget:
    """What judges may be asked. What is in hand when it is spent comes on top: some dozen questions at most."""

    calls: int = ATTACK_CALLS
    tokens: int = ATTACK_TOKENS

    def __str__(self) -> str:
        return f"{self.calls} calls and {self.tokens} tokens"


async def attacked(
    grader: Grader,
    rows: Sequence[AttackRow],
    *,
    jail: RunsPrograms | None = None,
    models: Models | None = None,
    seed: int = 0,
    budget: Budget | None = None,
) -> AttackReport:
    """What comes of attacking a grader on these rows; the same for the same seed, as far as the grader gives the same."""
    some = rows if len(rows) <= ROWS else [rows[place * len(rows) // ROWS] for place in range(ROWS)]
    spending = _Spending(models, budget or Budget())
    return await _Campaign(grader, Surface(grader.canonical, some), jail, spending, seed).report()


class _Scale(NamedTuple):
    """`bad` and `good` are mean scores of honest answers. `assumed`: no good answer earned anything, and 1 stands for what one would."""

    bad: float
    good: float
    assumed: bool = False

    def share(self, score: float) -> float:
        return (score - self.bad) / (self.good - self.bad)


class _Paid(NamedTuple):
    """An attack and its results by row; those in which its output is right are not among them."""

    attack: Attack
    results: dict[int, GradeResult]

    def mean(self, bad: float) -> float | None:
        """Of the scores, where there are enough; what has none was paid as a bad answer is."""
        scores = [bad if result.score is None else result.score for result in self.results.values() if not _away(result)]
        return fmean(scores) if len(scores) >= min(_LEAST, len(self.attack.outputs)) else None


@dataclass
class _Campaign:
    grader: Grader
    surface: Surface
    jail: RunsPrograms | None
    spending: "_Spending"
    seed: int

    def __post_init__(self) -> None:
        self._scores: set[float] = set()
        self._grades = self._failed = self._attacks = 0
        self._problem: str | None = None
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def report(self) -> AttackReport:
        scale, forms = await self._scale()
        if scale is None:
            spent = f"{self._spent()}: " if self.spending.spent else ""
            return self._concluded("undecided", f"{spent}no honest answer has a score: {self._problem}", None, [])
        paid = await self._tried(library(self.surface, forms), scale)
        exploits = self._exploits(paid, scale)
        # Of fewer rows what it learned could not be told from chance, and judges would be paid for that.
        if not exploits and len(self.surface.rows) >= 2 * _LEAST:
            paid = await self._trained(scale, forms, paid)
            exploits = self._exploits(paid, scale)
        if exploits:
            best = exploits[0]
            why = f"{best.name}: {best.mean_score:.3g} on average, where bad answers get {scale.bad:.3g} and good ones {scale.good:.3g}"
            return self._concluded("hackable", why, scale, exploits)
        if self.spending.spent:
            return self._concluded("undecided", f"{self._spent()}, and nothing was found until then", scale, [])
        if scale.assumed:
            problem = f", among failures like this: {self._problem}" if self._problem else ""
            return self._concluded("undecided", f"no answer that is known to be good was paid anything, and no attack was{problem}", scale, [])
        return self._concluded("sound", f"none of {self._attacks} attacks was paid half of what good answers are", scale, [])

    # The honest scale.

    async def _scale(self) -> tuple[_Scale | None, list[str]]:
        """None where nothing honest could be graded; and the forms in which right answers are taken."""
        places = range(len(self.surface.rows))
        right = {form: [form.replace(SLOT, self.surface.known(place)) for place in places] for form in (SLOT, *self.surface.forms)}
        asked = [self._graded([(place, text) for place, text in enumerate(texts)]) for texts in right.values()]
        given_good = self._graded([(place, text) for place in places for text in self.surface.rows[place].good])
        given_bad = self._graded([(place, text) for place in places for text in self.surface.rows[place].bad])
        others = self._graded([(place, self.surface.of_another(place)) for place in places])
        nonsense = self._graded([(place, NONSENSE) for place in places])
        good, bad, other, none, *in_forms = await gathered([given_good, given_bad, others, nonsense, *asked])
        if not self._scores:
            return None, []
        by_form = dict(zip(right, (_mean(results) for results in in_forms), strict=True))
        floor = _mean(bad) if len(bad) >= _LEAST else None
        if floor is None:
            floor = min((mean for mean in (_mean(other), _mean(none)) if mean is not None), default=0.0)
        ceiling = _mean(good) if len(good) >= _LEAST else None
        if ceiling is None:
            ceiling = max((mean for mean in by_form.values() if mean is not None), default=floor)
        scale = _usable(floor, ceiling)
        taken = [(mean, form) for form, mean in by_form.items() if mean is not None and form != SLOT and scale.share(mean) >= _PROMISING]
        best = [form for _, form in sorted(taken, key=lambda each: -each[0])[:_FORMS]]
        return scale, best

    # The library.

    async def _tried(self, attacks: Sequence[Attack], scale: _Scale) -> list[_Paid]:
        """On a few rows, and where that is promising on all."""
        self._attacks += len(attacks)
        count = len(self.surface.rows)
        few = sorted({place * count // _PROBE for place in range(_PROBE)})
        rest = [place for place in range(count) if place not in few]

        async def one(attack: Attack) -> _Paid:
            paid = await self._said(attack, few)
            mean = paid.mean(scale.bad)
            # Where all of the few are right or nobody answered, nothing is known yet.
            if rest and (mean is None or scale.share(mean) >= _PROMISING):
                paid = _Paid(attack, paid.results | (await self._said(attack, rest)).results)
            return paid

        return await gathered([one(attack) for attack in attacks])

    async def _said(self, attack: Attack, places: Sequence[int]) -> _Paid:
        counted = [place for place in places if not self.surface.right(place, attack.cores[place])]
        results = await self._graded([(place, attack.outputs[place]) for place in counted])
        return _Paid(attack, dict(zip(counted, results, strict=True)))

    # The policy.

    async def _trained(self, scale: _Scale, forms: Sequence[str], paid: Sequence[_Paid]) -> list[_Paid]:
        """What it learned on every other row, and was paid on the rest."""
        learning = list(range(0, len(self.surface.rows), 2))
        fragments = self._fragments(scale, forms, paid)
        policy = Policy(fragments, self.seed)
        earned: dict[str, float] = {}
        for _ in range(_ROUNDS):
            said = [policy.say() for _ in range(_SAYS)]
            fresh = {each.text: each for each in said if each.text not in earned}
            heard = await gathered([self._said(self._learned(each), learning) for each in fresh.values()])
            for text, outcome in zip(fresh, heard, strict=True):
                mean = outcome.mean(scale.bad)
                earned[text] = 0.0 if mean is None else scale.share(mean)
            policy.learn(said, [earned[each.text] for each in said])
        best = sorted(earned, key=lambda text: -earned[text])[:_EXAMPLES]
        held_out = [place for place in range(len(self.surface.rows)) if place not in learning]
        self._attacks += len(best)
        return await gathered([self._said(self._learned(Said(text, ())), held_out) for text in best])

    def _learned(self, said: Said) -> Attack:
        outputs = [said.text.replace(PROMPT, prompt) for prompt in self.surface.prompts]
        return Attack(f"what a tiny policy learned to say: `{said.text.replace(PROMPT, '{prompt}')[:60]}`", outputs, outputs)

    def _fragments(self, scale: _Scale, forms: Sequence[str], paid: Sequence[_Paid]) -> list[str]:
        """What earned something before, and what the grader and the rows give away."""
        means = [(mean, each.attack) for each in paid if not each.attack.runs and (mean := each.mean(scale.bad)) is not None]
        earning = [attack.outputs[0] for mean, attack in sorted(means, key=lambda each: -each[0]) if len(set(attack.outputs)) == 1]
        known = [form.replace(SLOT, core) for form in (SLOT, *forms) for core in self.surface.all_known[:4]]
        every = [PROMPT, *earning[: _FRAGMENTS // 2], *known, *self.surface.texts, "yes", "1", "\n"]
        return list(dict.fromkeys(text[:_SHOWN_CHARS] for text in every if text))[:_FRAGMENTS]

    # Grades, and what is concluded.

    def _spent(self) -> str:
        return f"the budget of {self.spending.budget} was spent after {self._grades} grades"

    async def _graded(self, said: Sequence[tuple[int, str]]) -> list[GradeResult]:
        """In a batch of its own: what an output leaves behind in a program is seen by no other attack."""
        if not said:
            return []
        rows = self.surface.rows
        inputs = [GradeInput(item=rows[place].item, sample=sample_of(text), messages=rows[place].messages) for place, text in said]
        async with self._places:
            if self.spending.spent:
                return [GradeResult.failed("unavailable", "the budget is spent")] * len(said)
            results = await self.grader.grade(inputs, jail=self.jail, models=self.spending.asked)
        self._grades += len(results)
        for result in results:
            if result.error is not None:
                self._failed += 1
                self._problem = self._problem or f"{result.error.kind}, {result.error.detail}"
            if result.score is not None:
                self._scores.add(result.score)
        return results

    def _exploits(self, paid: Sequence[_Paid], scale: _Scale) -> list[Exploit]:
        means = [(each, mean) for each in paid if (mean := each.mean(scale.bad)) is not None and scale.share(mean) >= SUCCESS]
        # Of those that are paid alike, the shortest shows best what is wrong.
        best = sorted(means, key=lambda each: (-each[1], len(each[0].attack.outputs[0])))[:_EXPLOITS]
        return [
            Exploit(
                name=" ".join(each.attack.name.split()),
                mean_score=mean,
                share=scale.share(mean),
                rows=len(each.results),
                examples=self._examples(each),
            )
            for each, mean in best
        ]

    def _examples(self, paid: _Paid) -> list[AttackExample]:
        scored = [(result.score, place, result) for place, result in paid.results.items() if result.score is not None]
        return [
            AttackExample(
                prompt=prompt_of(self.surface.rows[place])[:_SHOWN_CHARS],
                output=paid.attack.outputs[place][:_SHOWN_CHARS],
                score=score,
                reason=result.reason,
            )
            for score, place, result in sorted(scored, key=lambda each: -each[0])[:_EXAMPLES]
        ]

    def _concluded(self, verdict: str, why: str, scale: _Scale | None, exploits: Sequence[Exploit]) -> AttackReport:
        return AttackReport.model_validate(
            {
                "hash": self.grader.hash,
                "verdict": verdict,
                "why": why,
                "bad_score": scale and scale.bad,
                "good_score": None if scale is None or scale.assumed else scale.good,
                "exploits": list(exploits),
                "attacks": self._attacks,
                "grades": self._grades,
                "failed": self._failed,
                "varied": len(self._scores) > 1,
                "calls": self.spending.calls,
                "tokens": self.spending.tokens,
                "spent": self.spending.spent,
            }
        )


class _Spending:
    """Asks others, and counts what it takes."""

    def __init__(self, models: Models | None, budget: Budget) -> None:
        self._models, self.budget = models, budget
        self.calls = self.tokens = 0

    @property
    def asked(self) -> Models | None:
        """This, where there is anybody to be asked."""
        return None if self._models is None else self

    @property
    def spent(self) -> bool:
        """Whether nobody is to be asked any more."""
        return self.calls >= self.budget.calls or self.tokens >= self.budget.tokens

    async def ask(self, question: Question) -> Answer:
        """One answer."""
        assert self._models is not None
        self.calls += 1
        answer = await self._models.ask(question)
        self._count(answer.usage)
        return answer

    async def embed(self, model: str, texts: Sequence[str]) -> Vectors:
        """A vector for each text."""
        assert self._models is not None
        self.calls += 1
        found = await self._models.embed(model, texts)
        self._count(found.usage)
        return found

    def _count(self, usage: GradeUsage) -> None:
        self.tokens += usage.prompt_tokens + usage.completion_tokens


def _usable(bad: float, good: float) -> _Scale:
    """With a distance between the two: where right and wrong are paid alike, being paid at all is no sign of competence."""
    if good - bad > 1e-6:
        return _Scale(bad, good)
    return _Scale(min(bad, 0.0), good) if good > 1e-6 else _Scale(bad, bad + 1.0, assumed=True)


def _mean(results: Sequence[GradeResult]) -> float | None:
    scores = [result.score for result in results if result.score is not None]
    return fmean(scores) if scores else None


def _away(result: GradeResult) -> bool:
    return result.error is not None and result.error.kind == "unavailable"
