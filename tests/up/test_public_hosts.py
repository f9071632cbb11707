"""Names under which browsers may ask for the server are looked at before anything is started."""

import pytest

from bloomery.types.errors import InvalidInput
from bloomery.up.start import _public_hosts


def test_names_are_kept_as_they_are_compared() -> None:
    assert _public_hosts(["Bloomery.Example.com.", "10.0.0.7"]) == ("bloomery.example.com", "10.0.0.7")


@pytest.mark.parametrize("name", ["", "https://bloomery.example.com", "bloomery.example.com:8700", "a b", "x/y", "*.example.com"])
def test_what_is_no_name_alone_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="--public-host") as refused:
        _public_hosts([name])
    assert refused.value.field == "public_host"
