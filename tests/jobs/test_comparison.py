"""What a job is compared with: every held-out answer is scored once by each of both weights, whatever is measured of it."""

import json
import threading

import httpx
import pytest

from bloomery.client import Client
from bloomery.jobs.comparison import Both, compare_pairs, look_at_pairs
from bloomery.render import Rendered
from bloomery.render.rows import RenderedPair
from tests.live import LiveServer

BASE = "bloomery-tiny"
PAIRS = [RenderedPair(Rendered([100, 101, 102 + number], [0, 1, 1]), Rendered([100, 101, 120 + number, 130], [0, 0, 1, 1])) for number in range(3)]


class CountsScores(httpx.BaseTransport):
    """How often the server was asked to score a text."""

    def __init__(self) -> None:
        self._wire, self._lock = httpx.HTTPTransport(), threading.Lock()
        self.scores = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/v1/asample" and "prompt_logprobs" in json.loads(request.read()):
            with self._lock:
                self.scores += 1
        return self._wire.handle_request(request)

    def close(self) -> None:
        self._wire.close()


def test_both_measures_of_a_pair_follow_from_one_score_of_each_answer(live_server: LiveServer) -> None:
    counted = CountsScores()
    with Client(live_server.url, live_server.key, transport=counted) as client:
        sampler = client.sampler(BASE)
        prefers, margin = compare_pairs(Both(sampler, sampler), PAIRS)
        assert counted.scores == 2 * 2 * len(PAIRS)
        looked = look_at_pairs(sampler, PAIRS)
    assert [prefers.name, margin.name] == ["prefers", "margin"]
    assert (prefers.rows, prefers.difference, margin.difference) == (len(PAIRS), 0, 0)
    assert looked == pytest.approx({"prefers": prefers.before, "margin": margin.after}, abs=1e-12)
    assert margin.before != 0


def test_without_pairs_nothing_is_compared(live_server: LiveServer) -> None:
    with Client(live_server.url, live_server.key) as client:
        assert compare_pairs(Both(client.sampler(BASE), client.sampler(BASE)), []) == []
