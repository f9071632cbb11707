"""What callers may read of errors: of foreign ones, and of ours by the names of their own fields."""

import re
from pathlib import Path

import pytest

from bloomery.types.errors import (
    BY_CODE,
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    RateLimited,
    TooLarge,
    WorkerError,
    blame,
    code_of,
    naming,
    reason,
)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[Errno 2] No such file or directory: '/srv/data/runs/run-1/ops-1.seg'", "[Errno 2] No such file or directory: 'ops-1.seg'"),
        ("Unable to open file /srv/data/blobs/a.b: denied", "Unable to open file a.b: denied"),
        ("cannot read '/home/John Doe/data/blobs/a.b': 1/2", "cannot read 'a.b': 1/2"),
        ('a link "/a/b/" leads away', 'a link "" leads away'),
        ("`tinker://run-1/weights/a` and 1/2 and x/y/z stay", "`tinker://run-1/weights/a` and 1/2 and x/y/z stay"),
        ("https://example.org/a/b stays", "https://example.org/a/b stays"),
    ],
)
def test_of_a_file_callers_learn_the_name_and_not_where_the_server_keeps_it(said: str, told: str) -> None:
    assert reason(OSError(said)) == told
    with pytest.raises(WorkerError) as blamed, blame(WorkerError, "it broke"):
        raise OSError(said)
    assert blamed.value.message == f"it broke: OSError: {told}"


@pytest.mark.parametrize("directory", ["/srv/data", "/home/John Doe/my data", '/srv/it\'s "here"/da ta', "/srv/d'a'ta/é\\ /x"])
def test_of_a_file_that_an_error_names_no_directory_is_told_whatever_it_is_called(directory: str) -> None:
    path = f"{directory}/runs/run-1/ops-1.seg"
    assert reason(OSError(17, "File exists", path)) == "[Errno 17] File exists: 'ops-1.seg'"
    assert reason(OSError(17, "File exists", path.encode())) == "[Errno 17] File exists: 'ops-1.seg'"
    assert reason(OSError(17, "File exists", Path(path))) == "[Errno 17] File exists: 'ops-1.seg'"
    assert reason(OSError(18, "Not here", f"{path}/", None, f"{directory}/b c")) == "[Errno 18] Not here: 'ops-1.seg' -> 'b c'"
    assert reason(OSError(9, "Bad file", 7)) == "[Errno 9] Bad file: 7"


def test_whatever_is_not_ours_is_told_of_as_the_servers() -> None:
    assert [code_of(error) for error in (NotFound("gone"), TooLarge("large"), OSError(28, "full"))] == ["not_found", "too_large", "internal"]


@pytest.mark.parametrize("beginning", ["", "cannot read '/home/John Doe/", "x" * 990 + " /srv/data/"])
def test_what_a_foreign_error_says_is_told_up_to_a_length_and_still_without_directories(beginning: str) -> None:
    told = reason(RuntimeError(beginning + "far/too/" * 100_000 + "much"))
    assert len(told) <= 1000
    assert not set(re.findall("home|srv|John", told))
    assert len(reason(RuntimeError("too much" * 100_000))) == 1000
    assert reason(RuntimeError("x" * 1000)) == "x" * 1000


def test_the_code_of_damage_means_the_damage_itself() -> None:
    assert BY_CODE["corrupt"] is Corrupt


def test_errors_of_what_was_asked_for_it_name_the_callers_field() -> None:
    with pytest.raises(RateLimited) as told, naming("graders.0"):
        raise RateLimited("no more", field="model", resource="tokens", retry_after_s=7.0)
    assert (told.value.field, told.value.resource, told.value.retry_after_s) == ("graders.0", "tokens", 7.0)
    with pytest.raises(TooLarge) as below, naming("file", InvalidInput):
        raise TooLarge("too many", field="splits.train")
    assert below.value.field == "file"
    with pytest.raises(NotFound) as other, naming("file", InvalidInput, Conflict):
        raise NotFound("gone", field="name")
    assert other.value.field == "name"
