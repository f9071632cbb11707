"""What must not reach the disk, and what must."""

import sys

import pytest

from bloomery.services.data.redaction import pseudonym, redact, redact_text

SECRETS = {
    "mail ada.lovelace+x@example.co.uk now": "mail [email] now",
    "call +44 20 7946 0958 today": "call [phone] today",
    "call (415) 555-2671 today": "call [phone] today",
    "call 415-555-2671 today": "call [phone] today",
    "card 4111 1111 1111 1111 ok": "card [card] ok",
    "card 4111111111111111.": "card [card].",
    "key sk-abcdefghijklmnopqrstuvwx in use": "key [api key] in use",
    "key tml-0123456789abcdefghij in use": "key [api key] in use",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789": "[api key]",
    "AKIAABCDEFGHIJKLMNOP": "[api key]",
    "api_key = 'abcdef0123456789abcdef'": "api_key = '[api key]'",
    "Authorization: Bearer abcdefghijklmnop.qrst": "Authorization: Bearer [token]",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl": "[token]",
    "postgres://ada:hunter2@db/x": "postgres://[credentials]@db/x",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- after": "[private key] after",
    "-----BEGIN PRIVATE KEY-----\nMIIE cut off": "[private key]",
}
HARMLESS = [
    "released 2024-05-24, version 3.11.4, build 20240524103000",
    "order 4111 1111 1111 1112 has sixteen digits that are no card",
    "sk-learn and pk_1 are not keys; a@b is no address",
    "def open(path, mode='r', *, token=None): 100 - 200 - 3000",
    "Bearer of news; basic arithmetic: 1 + 1 = 2",
]


@pytest.mark.parametrize(("text", "clean"), SECRETS.items())
def test_secrets_are_replaced(text: str, clean: str) -> None:
    assert redact_text(text) == clean


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_stays(text: str) -> None:
    assert redact_text(text) == text


def test_redaction_reaches_keys_and_numbers_of_nested_values() -> None:
    value = {"messages": [{"content": "hi"}, {"a@b.cd": [4111111111111111, 1.5, None, True]}]}
    assert redact(value) == ({"messages": [{"content": "hi"}, {"[email]": ["[card]", 1.5, None, True]}]}, True)


def test_a_value_without_secrets_is_unchanged_and_says_so() -> None:
    value = {"seed": 9007199254740993, "text": "nothing here", "list": [1, [2.5]]}
    assert redact(value) == (value, False)


@pytest.mark.parametrize("number", [10**12 - 1, -(10**12) + 1, 10**12, 4111111111111111, -4111111111111111, True, 1.5, None, "a@b.cd"])
def test_one_among_many_numbers_is_redacted_as_it_is_alone(number: object) -> None:
    alone, (found, changed) = redact(number), redact([1, number, 3])
    assert (found, changed) == ([1, alone.value, 3], alone.changed)
    assert type(found[1]) is type(alone.value)


def test_token_ids_are_not_walked_through() -> None:
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        redacted = redact({"input": [[7] * 1000, [8] * 1000]})
    finally:
        sys.setprofile(None)
    assert redacted == ({"input": [[7] * 1000, [8] * 1000]}, False)
    assert called.count("redact") == 4


def test_pseudonyms_keep_identifiers_apart() -> None:
    assert pseudonym("episode-7") == "episode-7"
    first, second = pseudonym("ada@example.com"), pseudonym("bob@example.com")
    assert first != second
    assert first == pseudonym("ada@example.com")
    assert "ada" not in first


# All but "sk-" only seem to begin a secret.
@pytest.mark.slow
@pytest.mark.parametrize("piece", ["a", "1", "1 ", "a.", "+1", "-----BEGIN ", "sk-", "a:b", "eyJa", "(1", "://a:"])
def test_hostile_text_is_read_in_linear_time(piece: str) -> None:
    # Not a measurement: quadratic matching of a million characters would run into the test's time limit.
    text = piece * (1_000_000 // len(piece))
    assert redact_text(text) == ("[api key]" if piece == "sk-" else text)
