from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.api.routes.openai.choices import Choice, Piece, prompt_piece
from bloomery.render import ChatTokenizer
from bloomery.render.directory import Directory
from bloomery.types.generation import SampledToken
from tests.render.builders import byte_level, metaspace

TOKENIZERS = [ChatTokenizer(Directory(tokenizer, None, {}, ())) for tokenizer in (byte_level(), metaspace())]
TEXT = st.text(alphabet="abT é🔥\n<", min_size=1, max_size=20)


def run(tokenizer: ChatTokenizer, tokens: list[int], stops: list[str]) -> tuple[list[Piece], Choice]:
    choice = Choice(0, tokenizer, stops=stops, ends=(), shows_tokens=True)
    pieces = []
    for position, token in enumerate(tokens):
        pieces.append(choice.feed(SampledToken(request_id="r", sample=0, position=position, token=token, logprob=-1.0)))
        if choice.reason:
            return pieces, choice
    return [*pieces, choice.finish("length")], choice


@settings(max_examples=100, deadline=None)
@given(text=TEXT, tokenizer=st.sampled_from(TOKENIZERS), stops=st.lists(st.text(alphabet="abé🔥", min_size=1, max_size=3), max_size=2))
def test_tokens_come_with_the_text_that_they_are_part_of(text: str, tokenizer: ChatTokenizer, stops: list[str]) -> None:
    pieces, choice = run(tokenizer, tokenizer.encode(text), stops)
    given_text, shown = "", []
    for piece in pieces:
        given_text += piece.text
        shown += piece.tokens
        if choice.reason != "length":
            assert all(token.start < len(given_text) for token in shown)
    assert [token.start for token in shown] == sorted(token.start for token in shown)
    assert (choice.reason == "stop") == any(stop in text for stop in stops)
    spelled = b"".join(token.token.data for token in shown)
    if choice.reason == "length":
        assert len(shown) == len(choice.tokens)
        # Tokenizers that mark spaces do not tell how many there are before the first word.
        assert spelled.decode().lstrip(" ") == given_text.lstrip(" ") == text.lstrip(" ")
    else:
        assert spelled.lstrip(b" ").startswith(given_text.lstrip(" ").encode())


@settings(max_examples=50, deadline=None)
@given(text=TEXT)
def test_an_echo_is_the_prompt(text: str) -> None:
    piece = prompt_piece(TOKENIZERS[0], TOKENIZERS[0].encode(text), None)
    assert piece == Piece(text, [])


@settings(max_examples=50, deadline=None)
@given(text=TEXT, cut=st.integers(0, 3))
def test_the_token_that_ends_an_answer_stands_behind_all_of_it(text: str, cut: int) -> None:
    tokenizer = TOKENIZERS[0]
    # Cut in the middle of a character, too.
    tokens = tokenizer.encode(text)[: -cut or None]
    end = byte_level().token_to_id("<|im_end|>")
    for shows_end in (False, True):
        choice = Choice(0, tokenizer, stops=(), ends=(end,), shows_tokens=True, shows_end=shows_end)
        events = [
            SampledToken(request_id="r", sample=0, position=position, token=token, logprob=-1.0) for position, token in enumerate([*tokens, end])
        ]
        pieces = [*map(choice.feed, events), choice.finish("stop")]
        shown = [token for piece in pieces for token in piece.tokens]
        assert len(shown) == len(tokens) + shows_end
        if shows_end:
            assert (shown[-1].token.text, shown[-1].start) == ("<|im_end|>", len("".join(piece.text for piece in pieces)))
