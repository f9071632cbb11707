"""Models that judge: `score_model` gives a number, `label_model` one of its labels.

The answer is JSON of a published form: `steps` to think in, and a `result`. One that is not, or was cut off, is asked for again, under another seed
where there is one; so is one that nobody gave. Both within a deadline, and whatever came to nothing is a failure and no score of 0. What is judged
stands in the prompt where the grader's own messages put it: nothing is added to them, so it is theirs to say where it begins and ends.
"""

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from blake3 import blake3

from bloomery.grade.declared import InputAudio, InputImage, LabelModel, Message, Part, SamplingParams, ScoreModel, canonical
from bloomery.grade.models import Answer, Models, Question, added
from bloomery.grade.template import Missing, parse_template, unicode
from bloomery.types.errors import BloomeryError, Forbidden, NotFound, RateLimited, Unauthorized, reason, shown
from bloomery.types.grading import GradeInput, GradeResult, GradeUsage

MAX_ATTEMPTS: Final = 3
DEADLINE_S: Final = 120.0
_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 20.0
_REASON_CHARS: Final = 4000
_STEPS: Final[Mapping[str, Any]] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"description": {"type": "string"}, "conclusion": {"type": "string"}},
        "required": ["description", "conclusion"],
        "additionalProperties": False,
    },
}

Pause = Callable[[float], Awaitable[None]]


class _NoVerdict(Exception):
    """An answer came, and is none that counts; the message says why. It may be another the next time."""


class _Verdict(NamedTuple):
    score: float
    reason: str | None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a judge is asked for one verdict, for how long, and how a pause is made."""

    attempts: int = MAX_ATTEMPTS
    deadline_s: float = DEADLINE_S
    pause: Pause = asyncio.sleep


class Judge:
    """One `score_model` or `label_model`. `version` is a hash of what decides its verdicts: prompt, model, parameters and form of the answer."""

    def __init__(self, spec: ScoreModel | LabelModel) -> None:
        self._spec = spec
        self._params = spec.sampling_params or SamplingParams()
        self._schema = _schema(spec)
        said = canonical(spec)
        decides = {"prompt": said["input"], "model": spec.model, "params": canonical(self._params), "schema": self._schema}
        self.version = blake3(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    async def grade(self, given: GradeInput, models: Models, patience: Patience) -> GradeResult:
        """One verdict. A model that there is not, or that the caller may not use, is raised: it would be so for every row."""
        try:
            messages = [{"role": message.role, "content": _content(message, given)} for message in self._spec.input]
        except Missing as missing:
            return GradeResult.failed("template", str(missing))
        asking = _Asking(models)
        try:
            async with asyncio.timeout(patience.deadline_s):
                return await self._until_a_verdict(messages, asking, patience)
        except TimeoutError:
            return asking.failed("unavailable", f"`{shown(self._spec.model)}` gave no verdict within {patience.deadline_s:g} s")

    async def _until_a_verdict(self, messages: list[dict[str, Any]], asking: "_Asking", patience: Patience) -> GradeResult:
        attempt = 0
        while True:
            attempt += 1
            try:
                verdict = self._verdict(await asking.ask(self._question(messages, attempt)))
                labels = {} if verdict.label is None else {self._spec.name or self._spec.type: verdict.label}
                return GradeResult(score=verdict.score, reason=verdict.reason, labels=labels, usage=asking.usage)
            except _NoVerdict as problem:
                if attempt >= patience.attempts:
                    return asking.failed("no_score", f"`{shown(self._spec.model)}` gave no verdict: {problem}")
            except (NotFound, Forbidden, Unauthorized):
                raise
            except BloomeryError as error:
                pause_s = _pause_s(error, attempt)
                if pause_s is None:
                    return asking.failed("no_score", f"`{shown(self._spec.model)}` cannot be asked this: {reason(error)}")
                if attempt >= patience.attempts:
                    return asking.failed("unavailable", f"`{shown(self._spec.model)}`: {reason(error)}")
                await patience.pause(pause_s)

    def _question(self, messages: list[dict[str, Any]], attempt: int) -> Question:
        params = self._params
        if params.seed is not None and attempt > 1:
            # The same seed would say the same again.
            params = params.model_copy(update={"seed": params.seed + attempt - 1})
        return Question(model=self._spec.model, messages=messages, schema=self._schema, params=params)

    def _verdict(self, answer: Answer) -> _Verdict:
        if answer.refusal is not None:
            raise _NoVerdict(f"it refused: {shown(unicode(answer.refusal), 200)}")
        if not answer.whole:
            raise _NoVerdict("it was cut off: allow more `max_completions_tokens`")
        said = _object(answer.text)
        why = _reason(said.get("steps"))
        match self._spec:
            case ScoreModel(range=[least, most]):
                return _Verdict(min(max(_number(said.get("result")), least), most), why)
            case LabelModel() as spec:
                if (label := said.get("result")) not in spec.labels:
                    raise _NoVerdict("its `result` is none of the labels")
                return _Verdict(float(label in spec.passing_labels), why, label)
        raise AssertionError


class _Asking:
    """Asks, and counts what that took, also where nothing came of it."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self.usage = GradeUsage()

    async def ask(self, question: Question) -> Answer:
        answer = await self._models.ask(question)
        self.usage = added(self.usage, answer.usage)
        return answer

    def failed(self, kind: Any, detail: str) -> GradeResult:
        return GradeResult.failed(kind, detail).model_copy(update={"usage": self.usage})


def _schema(spec: ScoreModel | LabelModel) -> dict[str, Any]:
    """Steps first: what a model writes before its result is what it can think with."""
    result = {"type": "number"} if isinstance(spec, ScoreModel) else {"type": "string", "enum": spec.labels}
    return {"type": "object", "properties": {"steps": _STEPS, "result": result}, "required": ["steps", "result"], "additionalProperties": False}


def _content(message: Message, given: GradeInput) -> Any:
    parts = [_part(part, given) for part in message.content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Part, given: GradeInput) -> dict[str, Any]:
    match part:
        case InputImage():
            detail = {} if part.detail is None else {"detail": part.detail}
            return {"type": "image_url", "image_url": {"url": parse_template(part.image_url, "input").fill(given), **detail}}
        case InputAudio():
            return {"type": "input_audio", "input_audio": part.input_audio.model_dump()}
    return {"type": "text", "text": parse_template(part.text, "input").fill(given)}


def _pause_s(error: BloomeryError, attempt: int) -> float | None:
    """How long to wait until asking again may help; None where it does not."""
    if isinstance(error, RateLimited):
        return max(error.retry_after_s, 0.0)
    if error.category == "user":
        return None
    # Many that are turned away together come back one by one.
    return min(math.ldexp(_FIRST_PAUSE_S, attempt - 1), _MAX_PAUSE_S) * random.uniform(0.5, 1.0)


def _object(text: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        raise _NoVerdict("its answer is not JSON") from None
    if not isinstance(said, dict):
        raise _NoVerdict("its answer is no object")
    return said


def _number(result: Any) -> float:
    """The published graders take texts that are numbers, too."""
    try:
        number = float("nan") if isinstance(result, bool) else float(result)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not math.isfinite(number):
        raise _NoVerdict("its `result` is no number")
    return number


def _reason(steps: Any) -> str | None:
    if not isinstance(steps, list):
        return None
    told = [f"{step.get('description', '')}: {step.get('conclusion', '')}" for step in steps if isinstance(step, dict)]
    return shown(unicode("\n".join(told)), _REASON_CHARS) or None
