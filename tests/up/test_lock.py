import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.config.data_dir import DataDir
from bloomery.types.errors import Conflict
from bloomery.up.lock import Holder, holder, locked


def named(pid: int, runtime_dir: str = "/nowhere") -> Holder:
    return Holder(pid=pid, host="127.0.0.1", port=8701, started_us=1, runtime_dir=runtime_dir)


def test_a_second_start_names_the_holder_and_what_to_do(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    with locked(data) as lock:
        lock.announce(named(os.getpid()))
        stop = rf"process {os.getpid()}, which serves http://127.0.0.1:8701: stop it with `bloomery stop --data-dir {tmp_path}`"
        with pytest.raises(Conflict, match=stop), locked(data):
            pytest.fail("the directory was taken twice")


def test_the_holder_is_known_only_while_it_holds(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    assert holder(data) is None
    with locked(data) as lock:
        lock.announce(named(os.getpid()))
        assert holder(data) == named(os.getpid())
    assert holder(data) is None


def test_a_killed_holder_leaves_its_name_to_the_next_one(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    with locked(data) as lock:
        lock.announce(named(2**22 + 1, runtime_dir="/tmp/bloomery-gone"))
    with locked(data) as lock:
        assert lock.previous == named(2**22 + 1, runtime_dir="/tmp/bloomery-gone")
        lock.clear()
    with locked(data) as lock:
        assert lock.previous is None


def test_a_child_that_outlives_the_holder_keeps_the_lock_until_it_is_gone(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    with locked(data) as lock:
        lock.announce(named(2**22 + 1))
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.fd,))
    assert holder(data) == named(2**22 + 1)
    child.communicate(b"\n")
    assert holder(data) is None


def test_an_ipv6_holder_has_a_url_that_browsers_take() -> None:
    assert Holder.parse(json.dumps({"pid": 1, "host": "::1", "port": 80, "started_us": 0, "runtime_dir": ""})).url == "http://[::1]:80"  # type: ignore[union-attr]
