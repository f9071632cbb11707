"""A disk that has no room for a data set: the caller is told, nothing is imported, nothing is left behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# The child may write 2 MiB per file: the database fits, the blob of the rows (3 MiB of noise as hex, halved by compression) does not.
IMPORT_ON_A_FULL_DISK = """
import json, resource, secrets, signal, sys
from pathlib import Path
from tests.api.server import serving

directory = Path(sys.argv[1])
row = json.dumps({"text": secrets.token_hex(3 << 20), "label": "noise"})
body = {"format": "jsonl", "splits": {"train": row}}
path = "/api/v1/datasets/data"
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with serving(directory) as server:
    server.http.post("/api/v1/datasets", json={"name": "data"})
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
    refused = server.http.post(f"{path}/versions", json=body)
    versions = server.http.get(path).json()["versions"]
    left = [str(file) for file in (directory / "blobs").rglob("*") if file.is_file()]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    again = server.http.post(f"{path}/versions", json=body)
print(json.dumps([refused.status_code, refused.json(), versions, left, again.status_code]))
"""


@pytest.mark.slow
def test_an_import_that_does_not_fit_on_the_disk_is_refused_whole(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", IMPORT_ON_A_FULL_DISK, str(tmp_path)]
    child = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert child.returncode == 0, child.stderr
    status, answer, versions, left, again = json.loads(child.stdout.splitlines()[-1])
    assert (status, answer["error"]["code"], answer["error"]["field"]) == (503, "unavailable", None)
    for part in ("cannot be written (File too large)", "nothing was added", "is the server's disk full?"):
        assert part in answer["error"]["message"]
    assert (versions, left) == ([], [])
    assert again == 201
