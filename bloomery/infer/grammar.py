"""Continuations that follow a grammar: which tokens may come next.

`Grammars` knows the spelling of one vocabulary and compiles grammars for it, `Guide` follows one continuation. A guide is made of the grammar and of
the tokens that it took, so a sample that is preempted, forked, repeated or resubmitted is guided alike. All that takes long happens beside the
sampler: some threads compile, others follow. A long grammar may take seconds, so those that are short or compiled have a thread that none of the long
ones uses.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bloomery.types.errors import InvalidInput, NotSupported, blame
from bloomery.types.generation import Generate, Grammar
from bloomery.types.grammar import LIMITS, brief, native, on_deep_stack

COMPILED: Final = 64
"""Grammars that are kept compiled: clients ask with the same one again and again."""
FOLLOWERS: Final = 2
SHORT_CHARS: Final = 1 << 13
"""Of a grammar that is compiled in milliseconds; one of the greatest length takes up to ten seconds."""
LONG_AT_ONCE: Final = 2
"""Long grammars that are compiled at a time: more would take the processors from who samples."""
_NO_WAY_ON: Final = "NoExtension"
_END: Final = b"<|end of what the grammar says|>"


class Grammars:
    """The grammars of one vocabulary, that of the `tokenizer.json` in a model's directory; it is read by `prepare`, or when the first one comes."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._file, self._vocab_size = directory / "tokenizer.json", vocab_size
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        """Of one that is not done yet somebody compiles it, and whoever else needs it waits for him."""
        self._looking, self._reading = Lock(), Lock()
        # Their threads end with this object.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._long_compilers = ThreadPoolExecutor(LONG_AT_ONCE, thread_name_prefix="long-grammars")
        self._followers = ThreadPoolExecutor(FOLLOWERS, thread_name_prefix="guides")

    @property
    def kept(self) -> tuple[Grammar, ...]:
        """Those that are kept compiled, the one that was wanted last at the end."""
        with self._looking:
            return tuple(self._compiled)

    def prepare(self) -> "Future[LLTokenizer]":
        """Read the vocabulary; where it cannot be followed, whoever comes with a grammar is told."""
        return self._compiler.submit(lambda: self._tokenizer)

    def guides(self, generate: Generate, grammar: Grammar) -> "Future[list[Guide]]":
        """A guide for each sample of a request, behind what was sampled of it elsewhere; InvalidInput where there can be none."""
        with self._looking:
            known = self._compiled.get(grammar)
            light = len(grammar.text) <= SHORT_CHARS or (known is not None and _is_good(known))
        return (self._compiler if light else self._long_compilers).submit(self._guides, generate, grammar)

    def follow(self, guide: "Guide", token: int) -> "Future[None]":
        """Have a guide take a token; nobody may ask it anything before that is done."""
        return self._followers.submit(guide.take, token)

    def guide(self, grammar: Grammar, stop_tokens: Collection[int]) -> "Guide":
        """The guide of a continuation's first token."""
        return Guide(self._shared(grammar).deep_copy(), partial(self._anew, grammar), self._vocab_size, stop_tokens)

    def _guides(self, generate: Generate, grammar: Grammar) -> list["Guide"]:
        stops = generate.params.stop_tokens
        first = self.guide(grammar, stops)
        if (refusal := first.refusal(grammar)) is not None:
            raise refusal
        guides = [first.fork() for _ in range(generate.num_samples)]
        for guide, begun in zip(guides, generate.begun or [()] * len(guides), strict=True):
            guide.take(*(token for token in begun if token not in stops))
        return guides

    def _shared(self, grammar: Grammar) -> LLMatcher:
        with self._looking:
            known = self._compiled.get(grammar)
            mine = known is None or (known.done() and not _is_good(known))
            if known is None or mine:
                known = self._compiled[grammar] = Future()
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        if mine:
            self._compile_for_all(grammar, known)
        return known.result()

    def _compile_for_all(self, grammar: Grammar, waited_for: "Future[LLMatcher]") -> None:
        try:
            waited_for.set_result(self._compile(grammar))
        except BaseException as error:
            with self._looking:
                # What is refused is not kept.
                if self._compiled.get(grammar) is waited_for:
                    del self._compiled[grammar]
            waited_for.set_exception(error)

    def _anew(self, grammar: Grammar) -> LLMatcher:
        """One that shares nothing. A copy of the kept one has failed: what they share may be at its limits, much memory that helps nobody."""
        with self._looking:
            self._compiled.pop(grammar, None)
        return self._compile(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        tokenizer, text = self._tokenizer, native(grammar, grammar.field)
        matcher = on_deep_stack(lambda: LLMatcher(tokenizer, text, limits=LIMITS, log_level=0))
        if matcher.is_error():
            raise InvalidInput(f"`{grammar.field}` cannot be followed: {brief(matcher.get_error())}", field=grammar.field)
        return matcher

    @property
    def _tokenizer(self) -> LLTokenizer:
        # Once, also where several compile.
        with self._reading:
            return self._read

    @cached_property
    def _read(self) -> LLTokenizer:
        if not self._file.is_file():
            raise NotSupported(f"there is no {self._file}: without a tokenizer no grammar can be followed", field="grammar")
        with blame(NotSupported, f"no grammar can be followed with the tokenizer {self._file}"):
            return LLTokenizer(TokenizerWrapper(_Vocabulary(self._file.read_text(encoding="utf-8"), self._vocab_size)))


def _is_good(compiled: "Future[LLMatcher]") -> bool:
    """Whether a grammar is compiled, and its copies may go on finding out more of it."""
    return compiled.done() and not compiled.result().is_error()


class Guide:
    """How far one continuation is in its grammar, and what may come next: one of the grammar's tokens, or where it may end a stop token."""

    def __init__(self, matcher: LLMatcher, compile_alone: Callable[[], LLMatcher], vocab_size: int, stop_tokens: Collection[int]) -> None:
        self._matcher, self._compile_alone, self._vocab_size = matcher, compile_alone, vocab_size
        self._stop_tokens = [token for token in stop_tokens if 0 <= token < vocab_size]
        self._taken: list[int] = []
        self._alone = self._may_end = False
        self._mask = b""
        self.over = False
        """Whether the grammar is at its end and nothing but a stop token may follow."""
        self.problem: str | None = None
        """Why nothing can come next although the grammar is not at its end; then the continuation cannot go on."""
        self._look()

    def fork(self) -> "Guide":
        """Another guide, of the same next token."""
        twin = copy(self)
        twin._matcher, twin._taken = self._matcher.deep_copy(), [*self._taken]
        return twin

    @property
    def allowed_V(self) -> NDArray[np.bool_]:
        """The tokens that may come next."""
        bits = np.unpackbits(np.frombuffer(self._mask, np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)
        bits[self._stop_tokens] = self._may_end
        return bits

    def refusal(self, grammar: Grammar) -> InvalidInput | None:
        """What the caller is told where the continuation cannot go on, by the name that he gave the grammar."""
        return None if self.problem is None else InvalidInput(f"`{grammar.field}`: {self.problem}", field=grammar.field)

    def take(self, *tokens: int) -> None:
        """Go on by tokens that were allowed and that end nothing."""
        if tokens:
            self._taken += tokens
            self._matcher.consume_tokens(list(tokens))
            self._look()

    def _look(self) -> None:
        # At once and not when it is asked: what is wrong is then known beside the token that led there, and nobody else has to compute it.
        self._mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() and not self._alone:
            # Copies of a matcher share what they found out, and the limits on that: whether this one is beyond them is told by one of its own.
            self._matcher, self._alone = self._compile_alone(), True
            self._matcher.consume_tokens(self._taken)
            self._mask = self._matcher.compute_bitmask()
        self._may_end = self._matcher.is_accepting()
        self.over = self._may_end and self._matcher.is_stopped()
        self.problem = None if self.over else self._why_stuck()

    def _why_stuck(self) -> str | None:
        error = self._matcher.get_error()
        if _NO_WAY_ON in error or not (error or self.allowed_V.any()):
            return "the grammar allows no token of this model's vocabulary here: change it"
        return f"the grammar takes too much work to follow: {brief(error)}" if error else None


class _Vocabulary:
    """What llguidance wants to know of a tokenizer: the bytes of every token, which of them are control tokens, and how it spells a text.

    One token more than the model has stands for the end, so that none of the model's own can be taken for it.
    """

    def __init__(self, text: str, vocab_size: int) -> None:
        described = json.loads(text)
        known = LLTokenizer(text)
        self.eos_token_id, self.bos_token_id = vocab_size, None
        special = [token for token in range(min(known.vocab_size, vocab_size)) if known.is_special_token(token)]
        names = {token["id"]: token["content"].encode() for token in described["added_tokens"]}
        # An id without a token, of which large models have some, is spelled by nothing and so never allowed.
        tokens = [known.decode_bytes([token]) for token in range(min(known.vocab_size, vocab_size))]
        for token in special:
            tokens[token] = names.get(token, b"")
        self.tokens: list[bytes] = [*tokens, *[b""] * (vocab_size - len(tokens)), _END]
        self.special_token_ids = [*special, vocab_size]
        ordinary = sorted(set(range(len(tokens))) - set(special), reverse=True)
        self._by_bytes = {tokens[token]: token for token in ordinary if tokens[token]}
        self._longest = max(map(len, self._by_bytes), default=1)
        self._plain = _without_control(described)

    def __call__(self, text: str | bytes) -> Sequence[int]:
        """The tokens of a text, none of them a control token: as the tokenizer spells it, unless that adds something before a first word."""
        data = text.encode() if isinstance(text, str) else text
        with_tokenizer: list[int] = self._plain.encode(data.decode(errors="replace"), add_special_tokens=False).ids
        return with_tokenizer if self._spell(with_tokenizer) == data else self._longest_first(data)

    def _spell(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.tokens[token] for token in tokens if token < len(self.tokens))

    def _longest_first(self, data: bytes) -> list[int]:
        tokens: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            stop = next((stop for stop in ends if data[start:stop] in self._by_bytes), None)
            if stop is None:
                return tokens
            tokens.append(self._by_bytes[data[start:stop]])
            start = stop
        return tokens


def _without_control(described: dict[str, Any]) -> Tokenizer:
    """The tokenizer as it spells ordinary text: the name of a control token in it is text too."""
    return Tokenizer.from_str(json.dumps({**described, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}))
