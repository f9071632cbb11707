"""Tokens say what was signed, to their audience, until they end."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.services.access.tokens import Tokens, signing_key
from bloomery.types.errors import InvalidToken
from bloomery.types.ids import now_us

TOKENS = Tokens(b"k" * 32)
SOON_S = now_us() // 1_000_000 + 86_400
TOKEN = TOKENS.sign("login", {"sub": "me"}, expires_s=SOON_S)


@given(st.dictionaries(st.text(max_size=8).filter(lambda name: name not in ("aud", "iat", "exp")), st.text(max_size=8) | st.integers(), max_size=4))
def test_a_token_says_what_was_signed(claims: dict[str, object]) -> None:
    said = TOKENS.read("login", TOKENS.sign("login", claims, expires_s=SOON_S))
    assert {name: said[name] for name in claims} == claims
    assert (said["aud"], said["exp"]) == ("login", SOON_S)


@given(st.data())
def test_a_changed_token_is_none(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(TOKEN) - 1))
    changed = TOKEN[:place] + data.draw(st.characters(exclude_characters=TOKEN[place], codec="ascii")) + TOKEN[place + 1 :]
    with pytest.raises(InvalidToken):
        TOKENS.read("login", changed)


@given(st.text(max_size=40))
def test_any_text_is_none(text: str) -> None:
    with pytest.raises(InvalidToken):
        TOKENS.read("login", text)


def test_a_token_is_for_its_audience_its_time_and_its_server() -> None:
    token = TOKENS.sign("download", {}, expires_s=SOON_S)
    with pytest.raises(InvalidToken, match="for download, not for login"):
        TOKENS.read("login", token)
    with pytest.raises(InvalidToken, match="is over"):
        TOKENS.read("download", TOKENS.sign("download", {}, expires_s=now_us() // 1_000_000))
    with pytest.raises(InvalidToken, match="did not sign"):
        Tokens(b"other" * 8).read("download", token)


def test_the_signing_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "signing_key"
    (tmp_path / "signing_key.new").write_bytes(b"half")
    key = signing_key(path)
    assert len(key) == 32
    assert signing_key(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["signing_key"]
