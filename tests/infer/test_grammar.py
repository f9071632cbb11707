"""What a grammar promises is kept by the worst model there is, and nobody beside it notices."""

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer

from bloomery.infer.grammar import FOLLOWERS, LONG_AT_ONCE, SHORT_CHARS, Grammars, Guide
from bloomery.infer.plan import Limits
from bloomery.infer.sampler import Sampler
from bloomery.models.decoder import Decoder
from bloomery.models.pads import BLOCK_PLACES
from bloomery.types.errors import InvalidInput
from bloomery.types.generation import Abort, Generate, Grammar, SampledToken, SampleFinished
from bloomery.types.grammar import MAX_GRAMMAR_CHARS, check_grammar, lark
from tests.infer.builders import Adapters, Answer, answers, drain, full_logprobs, generate, prompt, request
from tests.render.builders import byte_level, metaspace, write
from tests.train.builders import VOCAB, decoder

END = byte_level().token_to_id("<|im_end|>")
PLACE = {"type": "integer", "minimum": 0, "maximum": 9}
PAIR = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/place"}, "y": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}

SCHEMAS: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "an enum": ({"enum": ["red", "gr\u00fcn", 3, None, ["x"]]}, lambda value: value in ("red", "gr\u00fcn", 3, None, ["x"])),
    "the name of a control token": ({"enum": ["<|im_end|>", "<|im_start|>"]}, lambda value: value in ("<|im_end|>", "<|im_start|>")),
    "bounds of a whole number": ({"type": "integer", "minimum": -7, "exclusiveMaximum": 120}, lambda value: type(value) is int and -7 <= value < 120),
    "bounds of a number": ({"type": "number", "minimum": 0.5, "maximum": 0.75}, lambda value: 0.5 <= value <= 0.75),
    "a text": ({"type": "string", "minLength": 2, "maxLength": 4}, lambda value: isinstance(value, str) and 2 <= len(value) <= 4),
    "a pattern": ({"type": "string", "pattern": "^[a-c]{2}[0-9]$"}, lambda value: re.fullmatch("[a-c]{2}[0-9]", value) is not None),
    "arrays in arrays": (
        {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}}},
        lambda value: 1 <= len(value) <= 2 and all(len(row) <= 2 and all(type(item) is bool for item in row) for row in value),
    ),
    "references": (
        {"$ref": "#/$defs/pair", "$defs": {"pair": PAIR, "place": PLACE}},
        lambda value: value.keys() == {"x", "y"} and value["x"] in range(10) and (value["y"] is None or value["y"] in range(10)),
    ),
    "an object": (
        {
            "type": "object",
            "properties": {
                "kind": {"const": "point"},
                "at": {"type": "array", "prefixItems": [{"enum": [1, 2]}, {"enum": [3]}], "items": False, "minItems": 2},
            },
            "required": ["kind", "at"],
            "additionalProperties": False,
        },
        lambda value: value["kind"] == "point" and value["at"][0] in (1, 2) and value["at"][1:] == [3] and len(value) == 2,
    ),
}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder()


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(write(tmp_path_factory.mktemp("grammar"), byte_level()), VOCAB)


def sampler(model: Decoder, grammars: Grammars | None, limits: Limits | None = None) -> Sampler:
    return Sampler(model, Adapters(model), limits, grammars)


def guided(name: str, grammar: Grammar, **changes: Any) -> Generate:
    return request(name, prompt(20), **{"asked": {"grammar": grammar}, "max_tokens": 400, "num_samples": 4, "stop_tokens": (END,)} | changes)


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def texts(answer: Answer) -> list[str]:
    """What was said, without the token that ends it."""
    assert answer.failure is None
    said = []
    for sample, tokens in answer.tokens.items():
        assert answer.reasons[sample] == "stop"
        assert END not in tokens[:-1]
        said.append(byte_level().decode(tokens[:-1] if tokens[-1] == END else tokens, skip_special_tokens=False))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_parses_and_fits_its_schema(model: Decoder, grammars: Grammars, name: str) -> None:
    wanted, fits = SCHEMAS[name]
    for temperature in (1.0, 0.0):
        answer = generate(sampler(model, grammars), guided("a", schema(wanted), temperature=temperature, top_p=0.9, num_samples=2))["a"]
        for text in texts(answer):
            assert fits(json.loads(text)), text
        assert all(tokens[-1] == END for tokens in answer.tokens.values())


@pytest.mark.parametrize("pattern", [r"[a-f]{3}-\d+[.!]", r"(yes|no|perhaps)", r"\w{1,5}(, [\w/]{1,5}){2}", r".{0,6}", "(?i)grüße|東京"])
def test_every_answer_matches_its_regular_expression_whole(model: Decoder, grammars: Grammars, pattern: str) -> None:
    for text in texts(generate(sampler(model, grammars), guided("a", regex(pattern)))["a"]):
        assert re.fullmatch(pattern, text, re.ASCII if "\\" in pattern else 0), text


@pytest.mark.parametrize(
    "text",
    ['start: "SELECT " name ("," name)* " FROM " name\nname: /[a-z]{1,3}/', 'root ::= "SELECT " n ("," n)* " FROM " n\nn ::= [a-z] [a-z]?'],
    ids=["Lark", "GBNF"],
)
def test_every_answer_is_of_its_grammar(model: Decoder, grammars: Grammars, text: str) -> None:
    for said in texts(generate(sampler(model, grammars), guided("a", lark(text, "grammar")))["a"]):
        assert re.fullmatch(r"SELECT [a-z]{1,3}(,[a-z]{1,3})* FROM [a-z]{1,3}", said), said


@pytest.mark.parametrize("text", ["A: /.*a.{1,40}/ & ~/.*c.{1,50}/", 'A: "\\"" ~ B // "', 'A: /"/ ~"c"', "A: ~ /7/"])
def test_a_complement_which_may_never_come_to_an_end_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"`guide` has a complement .* say what may come") as refused:
        lark(f"start: A\n{text}", "guide")
    assert refused.value.field == "guide"


@pytest.mark.parametrize("text", ['"~x"', "/~\\/~/", 'B~3..4\nB: "x"', 'B ~ 3\nB: "x"', '"x" // ~ "c"', '"x" # ~ "c"'])
def test_what_only_looks_like_a_complement_is_taken(text: str) -> None:
    check_grammar(lark(f"start: A\nA: {text}" if "B" not in text else f"start: {text}", "guide"), "guide")


@pytest.mark.parametrize("names", [("an enum", "a pattern"), pytest.param(tuple(SCHEMAS), marks=pytest.mark.slow)], ids=len)
def test_an_answer_is_the_same_alone_in_company_preempted_and_repeated(model: Decoder, grammars: Grammars, names: tuple[str, ...]) -> None:
    constrained = [guided(name, schema(SCHEMAS[name][0]), seed=number, num_samples=2) for number, name in enumerate(names)]
    free = [request(f"f{length}", prompt(length), seed=length, max_tokens=8, temperature=0.8) for length in (3, 77)]
    together = generate(sampler(model, grammars), *constrained, *free)
    # So few places that samples are sent back to the queue all the time.
    crowded = generate(sampler(model, grammars, Limits(slots=3, cache_tokens=4 * BLOCK_PLACES, kept_tokens=0)), *constrained, *free)
    for each in (*constrained, *free):
        alone = generate(sampler(model, grammars), each)[each.request_id]
        assert together[each.request_id].told == crowded[each.request_id].told == alone.told
    unbothered = generate(sampler(model, None), *free)
    assert all(together[each.request_id].told == unbothered[each.request_id].told for each in free)


def test_others_go_on_while_a_grammar_is_compiled(model: Decoder, tmp_path: Path) -> None:
    grammars, compiled = Grammars(write(tmp_path, byte_level()), VOCAB), Event()
    grammars._compiler.submit(compiled.wait)
    engine, beside = sampler(model, grammars), request("b", prompt(30), max_tokens=20, seed=3)
    engine.submit(guided("a", regex("[a-f]{3}")))
    engine.submit(beside)
    events = []
    while len(events) < 21:
        events += engine.step()
    assert {event.request_id for event in events} == {"b"}
    assert (engine.busy, engine.waiting_sequences) == (True, 4)
    compiled.set()
    texts(answers(drain(engine))["a"])
    compiled.clear()
    grammars._compiler.submit(compiled.wait)
    engine.submit(guided("c", regex("[a-f]{4}")))
    engine.abort(Abort(request_id="c"))
    assert answers(drain(engine))["c"].reasons == dict.fromkeys(range(4), "abort")
    compiled.set()


def test_long_forms_hold_up_neither_short_ones_nor_one_that_is_compiled(model: Decoder, tmp_path: Path) -> None:
    grammars, compiled = Grammars(write(tmp_path, byte_level()), VOCAB), Event()
    known, other = (schema({"enum": [f"{word}{number:04}" for number in range(SHORT_CHARS // 4)]}) for word in ("known", "other"))
    alone = generate(sampler(model, grammars), guided("a", known))["a"]
    for _ in range(LONG_AT_ONCE):
        grammars._long_compilers.submit(compiled.wait)
    engine = sampler(model, grammars)
    for each in (guided("slow", other), guided("a", known), guided("b", regex("[a-f]{3}"))):
        engine.submit(each)
    events = []
    while sum(isinstance(event, SampleFinished) for event in events) < 8:
        events += engine.step()
    assert {event.request_id for event in events} == {"a", "b"}
    assert answers(events)["a"].told == alone.told
    compiled.set()
    texts(answers(drain(engine))["slow"])


def test_a_form_that_several_ask_for_at_once_is_compiled_once_and_refused_to_each(tmp_path: Path) -> None:
    grammars, began, go_on = CountingGrammars(write(tmp_path, byte_level()), VOCAB), Event(), Event()
    grammars.began, grammars.go_on = began, go_on
    with ThreadPoolExecutor(4) as pool:
        guides = [pool.submit(grammars.guide, regex("[a-f]{3}"), []) for _ in range(4)]
        refused = [pool.submit(grammars.guide, regex("(a"), []) for _ in range(4)]
        assert began.wait(60)
        go_on.set()
        assert len({guide.result().allowed_V.tobytes() for guide in guides}) == 1
        assert all("unclosed group" in str(each.exception()) for each in refused)
    assert grammars.compiled.count(regex("[a-f]{3}")) == 1


class CountingGrammars(Grammars):
    """Notes what it compiles, and begins when it is told to."""

    began: Event
    go_on: Event

    def __init__(self, directory: Path, vocab_size: int) -> None:
        super().__init__(directory, vocab_size)
        self.compiled: list[Grammar] = []

    def _compile(self, grammar: Grammar) -> LLMatcher:
        self.compiled.append(grammar)
        self.began.set()
        assert self.go_on.wait(60)
        return super()._compile(grammar)


def test_a_sample_whose_guide_is_late_keeps_nobody_waiting_and_says_the_same(model: Decoder, tmp_path: Path) -> None:
    grammars = Grammars(write(tmp_path, byte_level()), VOCAB)
    asked, beside = guided("a", schema(SCHEMAS["an object"][0]), num_samples=2), request("b", prompt(30), max_tokens=40, seed=3)
    alone = generate(sampler(model, grammars), asked)["a"]
    engine, events, held = sampler(model, grammars), [], Event()
    engine.submit(asked)
    while not events:
        events += engine.step()
    for _ in range(FOLLOWERS):
        grammars._followers.submit(held.wait)
    engine.submit(beside)
    while not any(event.request_id == "b" and isinstance(event, SampleFinished) for event in events):
        events += engine.step()
    assert max(len(tokens) for tokens in answers(events)["a"].tokens.values()) <= 2
    held.set()
    events += drain(engine)
    assert answers(events)["a"].told == alone.told
    assert answers(events)["b"].told == generate(sampler(model, None), beside)["b"].told


def test_a_resumed_answer_is_led_behind_what_was_begun(model: Decoder, grammars: Grammars) -> None:
    asked = guided("a", schema(SCHEMAS["an object"][0]), num_samples=2)
    whole = generate(sampler(model, grammars), asked)["a"]
    begun = tuple(tuple(tokens[: 3 * index]) for index, tokens in sorted(whole.tokens.items()))
    engine = sampler(model, grammars)
    engine.submit(replace(asked, begun=begun))
    rest: dict[int, list[int]] = {index: [] for index in whole.tokens}
    for event in drain(engine):
        if isinstance(event, SampledToken):
            rest[event.sample].append(event.token)
    assert {index: [*begun[index], *tokens] for index, tokens in rest.items()} == {index: list(tokens) for index, tokens in whole.tokens.items()}


def test_log_probabilities_are_the_models_own_beside_those_of_what_was_drawn_from(model: Decoder, grammars: Grammars) -> None:
    asked = guided("a", regex("(yes|no)"), num_samples=1, seed=5)
    engine = sampler(model, grammars)
    engine.submit(asked)
    events = [event for event in drain(engine) if isinstance(event, SampledToken)]
    tokens, start = [event.token for event in events], asked.prompt.shape[0]
    own = full_logprobs(model, [*asked.prompt.numpy().tolist(), *tokens], None)[start - 1 :].tolist()
    assert [event.logprob for event in events] == own
    # Two words to choose from, and then nothing but the end.
    assert all(event.processed_logprob is not None and event.processed_logprob > event.logprob for event in events)
    assert [event.processed_logprob for event in events[1:]] == [0.0] * (len(events) - 1)


def test_without_a_stop_token_an_answer_ends_where_its_grammar_does(model: Decoder, grammars: Grammars) -> None:
    answer = generate(sampler(model, grammars), guided("a", regex("[a-z]{3}"), stop_tokens=()))["a"]
    assert all(re.fullmatch("[a-z]{3}", text) for text in texts(answer))


def test_an_answer_that_is_whole_with_its_last_token_is_not_cut_off(model: Decoder, grammars: Grammars) -> None:
    answer = generate(sampler(model, grammars), guided("a", regex("[QJ]{3}"), max_tokens=3))["a"]
    assert set(answer.reasons.values()) == {"stop"}
    assert set(generate(sampler(model, grammars), guided("a", regex("[QJ]{4}"), max_tokens=3))["a"].reasons.values()) == {"length"}


def test_one_token_that_the_prefill_gives_follows_the_grammar_too(model: Decoder, grammars: Grammars) -> None:
    for seed in range(8):
        answer = generate(sampler(model, grammars), guided("a", regex("[xyz]"), max_tokens=1, num_samples=1, seed=seed))["a"]
        assert texts(answer)[0] in "xyz"


class LateGuides(Grammars):
    """Its guides take longer than a step waits for them."""

    def follow(self, guide: Guide, token: int) -> "Future[None]":
        def late() -> None:
            time.sleep(0.03)
            guide.take(token)

        return self._followers.submit(late)


@pytest.mark.parametrize(("max_tokens", "num_samples"), [(1, 1), (1, 2), (3, 1)])
def test_a_late_guide_costs_steps_and_no_token(max_tokens: int, num_samples: int, model: Decoder, grammars: Grammars, tmp_path: Path) -> None:
    wanted = guided("a", regex("[xyz]{4}"), max_tokens=max_tokens, num_samples=num_samples, stop_tokens=())
    late = generate(sampler(model, LateGuides(write(tmp_path, byte_level()), VOCAB)), wanted)["a"]
    in_time = generate(sampler(model, grammars), wanted)["a"]
    assert (late.tokens, late.reasons) == (in_time.tokens, in_time.reasons)
    assert [len(tokens) for tokens in late.tokens.values()] == [max_tokens] * num_samples


class BrokenGuides(Grammars):
    """Its guides break where they are to take a token, and say where the server keeps things, at length."""

    def follow(self, guide: Guide, token: int) -> "Future[None]":
        def broken() -> None:
            raise RuntimeError(f"no token {token} in /srv/data/vocabulary.bin" + " or elsewhere" * 100_000)

        return self._followers.submit(broken)


def test_a_guide_that_breaks_ends_its_own_request_alone_and_tells_neither_directories_nor_everything(model: Decoder, tmp_path: Path) -> None:
    engine, beside = sampler(model, BrokenGuides(write(tmp_path, byte_level()), VOCAB)), request("b", prompt(30), max_tokens=8, seed=3)
    found = generate(engine, guided("a", regex("[xyz]{4}"), num_samples=2), beside)
    assert found["a"].failure is not None
    assert found["a"].failure.category == "server"
    assert re.match(r"its grammar could not be followed: RuntimeError: no token \d+ in vocabulary.bin or else", found["a"].failure.message)
    assert len(found["a"].failure.message) < 1100
    assert found["b"].told == generate(sampler(model, None), beside)["b"].told
    assert (engine.running_sequences, engine.waiting_sequences) == (0, 0)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "objct"}), "objct"),
        (schema({"$ref": "#/$defs/nowhere"}), "nowhere"),
        (schema({"$ref": "http://example.com/schema"}), "example.com"),
        (schema({"type": "integer", "minimum": 5, "maximum": 2}), "minimum (5)"),
        (schema({"type": "string", "format": "klingon"}), "klingon"),
        (Grammar(kind="json_schema", text="[[["), "no JSON schema"),
        (schema(7), "schema"),
        (regex("(a"), "unclosed group"),
        (regex(r"(?=a)b"), "look-around"),
        (Grammar(kind="lark", text='begin: "a"'), "start"),
        (Grammar(kind="lark", text="start: nothing"), "nothing"),
        (regex("a" * (MAX_GRAMMAR_CHARS + 1)), "simplify"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_by_name_at_the_door_and_in_the_engine(
    model: Decoder, grammars: Grammars, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_grammar(grammar, "response_format")
    assert refused.value.field == "response_format"
    assert reason in refused.value.message
    assert refused.value.message.startswith("`response_format`")
    failure = generate(sampler(model, grammars), guided("a", grammar))["a"].failure
    assert failure is not None
    assert failure.category == "user"
    assert failure.message.startswith("`grammar`")
    assert reason in failure.message


def test_a_grammar_that_takes_too_much_work_ends_its_own_request_alone_and_is_not_kept(model: Decoder, grammars: Grammars) -> None:
    beside = request("b", prompt(30), max_tokens=20, seed=3)
    heavy = regex("(a?){500}a{500}")
    slow = guided("a", heavy, num_samples=2)
    both = generate(sampler(model, grammars), slow, beside)
    assert both["a"].failure is not None
    assert both["a"].failure.category == "user"
    assert both["a"].failure.message.startswith("`grammar`: the grammar takes too much work to follow")
    assert both["a"].failure.field == "grammar"
    assert "verbose" not in both["a"].failure.message
    assert heavy not in grammars.kept
    assert both["b"].told == generate(sampler(model, None), beside)["b"].told


def test_what_the_vocabulary_cannot_spell_is_said(model: Decoder, tmp_path: Path) -> None:
    letters = json.loads(metaspace().to_str())
    letters["model"]["vocab"] = {piece: number for number, piece in enumerate(["<unk>", "a", "b", "\u2581"])}
    letters["model"] |= {"merges": [], "byte_fallback": False}
    letters["added_tokens"] = []
    poor = Grammars(write(tmp_path, Tokenizer.from_str(json.dumps(letters))), VOCAB)
    assert generate(sampler(model, poor), guided("a", regex("ab"), stop_tokens=(99,)))["a"].failure is None
    failure = generate(sampler(model, poor), guided("a", regex("[xyz]"), stop_tokens=(99,)))["a"].failure
    assert failure is not None
    assert "vocabulary" in failure.message
    assert failure.category == "user"


@pytest.mark.parametrize("kind", ["byte level", "metaspace", "with words of its own"])
def test_every_kind_of_vocabulary_is_spelled(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.from_str((metaspace() if kind == "metaspace" else byte_level()).to_str())
    if kind == "with words of its own":
        tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False), AddedToken("The The", normalized=False)])
    vocab_size = tokenizer.get_vocab_size() + 7
    grammars = Grammars(write(tmp_path, tokenizer), vocab_size)
    wanted = {"enum": ["The fox", " is", "<tool_call> x", "The The {", "\u6771\u4eac"]}
    random = np.random.default_rng(0)
    for _ in range(20):
        guide, tokens = grammars.guide(schema(wanted), [vocab_size - 8]), []
        while not guide.over:
            tokens.append(int(random.choice(np.flatnonzero(guide.allowed_V))))
            guide.take(tokens[-1])
        assert guide.problem is None
        assert max(tokens) < tokenizer.get_vocab_size()
        # A decoder that drops the mark before a first word drops it here too.
        assert json.loads(tokenizer.decode(tokens, skip_special_tokens=False)) in wanted["enum"]
        assert np.flatnonzero(guide.allowed_V).tolist() == [vocab_size - 8]


def test_a_sampler_without_a_tokenizer_that_can_be_followed_refuses_grammars(model: Decoder, tmp_path: Path) -> None:
    (strange := tmp_path / "strange").mkdir()
    (strange / "tokenizer.json").write_text('{"model": {"type": "WordPiece"}}')
    for grammars in (None, Grammars(tmp_path, VOCAB), Grammars(strange, VOCAB)):
        failure = generate(sampler(model, grammars), guided("a", regex("a")))["a"].failure
        assert failure is not None
        assert failure.category == "user"
        assert "tokenizer" in failure.message
