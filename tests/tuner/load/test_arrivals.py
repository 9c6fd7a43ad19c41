from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.running import prompts
from tuner.load.arrivals import Target, closed_loop, patience, stagger
from tuner.load.client import Endpoint, Reply
from tuner.load.gate import Gate, enough
from tuner.load.laws import Closed, Constant, Gamma, Poisson, times
from tuner.load.level import Plan, Run, run_level
from tuner.load.processes import LoadError
from tuner.load.sources import JsonlPrompts
from tuner.load.workload import make_requests
from tuner.records import Workload


class Counting:
    """A server in this process that streams one event per token and counts who is being served."""

    def __init__(self, seconds_per_token: float = 0.002) -> None:
        self.pace = seconds_per_token
        self.active = 0
        self.most = 0
        self.bodies: list[dict[str, object]] = []
        self.abandoned = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                self.active += 1
                self.most = max(self.most, self.active)
                try:
                    await self.stream(writer, body["max_tokens"])
                finally:
                    self.active -= 1
        except asyncio.IncompleteReadError:
            writer.close()
        except ConnectionError:
            self.abandoned += 1

    async def stream(self, writer: asyncio.StreamWriter, tokens: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(1, tokens + 1):
            await asyncio.sleep(self.pace)
            finish = "length" if number == tokens else None
            document = {"choices": [{"text": "x", "finish_reason": finish}], "usage": {"completion_tokens": number}}
            data = b"data: " + json.dumps(document).encode() + b"\n\n"
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def on_server(server: Counting, folder: Path, plan: Plan) -> Run:
    requests = make_requests(plan.workload, "m", 1)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listener:
        endpoint = Endpoint("127.0.0.1", listener.sockets[0].getsockname()[1])
        return await run_level(Target(endpoint, requests, stall=20), plan)


def load(server: Counting, folder: Path, concurrency: int, window: float, first: int = 0, **more: Any) -> Run:
    fields = {
        "prompts": str(prompts(folder)),
        "output_tokens": 12,
        "window": max(window, 1e-3),
        "longest": 30,
        "width": 1,
    }
    work = Workload.model_validate(fields | more.pop("work", {}))
    return asyncio.run(on_server(server, folder, Plan(concurrency, work, first=first, **more)))


@pytest.mark.parametrize("concurrency", [1, 2, 7])
def test_a_level_keeps_its_concurrency_and_counts_whole_requests(tmp_path: Path, concurrency: int) -> None:
    server = Counting()
    run = load(server, tmp_path, concurrency, window=0.15, first=5)
    assert server.most == concurrency
    assert len(run.traces) >= enough(concurrency)
    for trace in run.traces:
        assert trace.error is None
        assert trace.output_tokens == 12
        assert run.opened <= trace.due < run.closed
        assert trace.lag >= 0
        assert trace.due <= trace.arrivals[0].time <= trace.ended
    indexes = [trace.index for trace in run.traces]
    assert len(set(indexes)) == len(indexes)
    assert min(indexes) >= 5 + concurrency  # the first of each slot is its warm-up
    assert run.lags
    assert min(run.lags) >= 0


def test_exactly_so_many_requests_are_measured(tmp_path: Path) -> None:
    server = Counting()
    run = load(server, tmp_path, 3, window=1, requests=8)
    assert [trace.index for trace in run.traces] == list(range(3, 11))
    assert run.uncounted == 3
    assert len(server.bodies) == 11
    assert run.closed == max(trace.ended for trace in run.traces)


def test_fewer_requests_than_slots(tmp_path: Path) -> None:
    assert len(load(Counting(), tmp_path, 4, window=1, requests=2).traces) == 2


def test_a_short_window_still_counts_enough(tmp_path: Path) -> None:
    assert len(load(Counting(), tmp_path, 3, window=0.0).traces) >= enough(3)


def test_a_window_ends_at_its_longest_however_wide_the_interval(tmp_path: Path) -> None:
    work = {"window": 0.05, "longest": 0.2, "width": 1e-9}
    run = load(Counting(), tmp_path, 2, window=0.05, work=work)
    assert run.closed - run.opened >= 0.2


def test_slots_are_spread_over_a_request(tmp_path: Path) -> None:
    server = Counting()
    load(server, tmp_path, 3, window=0.0)
    assert [body["max_tokens"] for body in server.bodies[:3]] == [3, 6, 9]
    assert {body["max_tokens"] for body in server.bodies[3:]} == {12}


def test_an_open_loop_does_not_wait_for_answers(tmp_path: Path) -> None:
    """Two users of 40 requests a second each, answers of 60 ms and more: about five are in flight."""
    server = Counting(seconds_per_token=0.005)
    law = {"kind": "constant", "rate": 40}
    run = load(server, tmp_path, 2, window=0.4, work={"arrivals": law})
    assert server.most > 2
    dues = [trace.due for trace in run.traces]
    assert [after - before for before, after in itertools.pairwise(dues)] == pytest.approx([1 / 80] * (len(dues) - 1))
    assert all(trace.error is None and trace.lag >= 0 for trace in run.traces)


@pytest.mark.parametrize("law", [Constant(rate=3), Poisson(rate=3), Gamma(rate=3, shape=0.25), Gamma(rate=3, shape=4)])
def test_laws_keep_their_rate_and_their_shape(law: Constant | Poisson | Gamma) -> None:
    gaps = list(itertools.islice(law.gaps(5, random.Random(3)), 20_000))
    assert statistics.fmean(gaps) == pytest.approx(1 / 15, rel=0.05)
    spread = statistics.stdev(gaps) / statistics.fmean(gaps)
    shape = {"constant": 0.0, "poisson": 1.0}.get(law.kind, getattr(law, "shape", 1.0) ** -0.5)
    assert spread == pytest.approx(shape, rel=0.05, abs=1e-9)


def test_arrivals_are_the_same_for_every_candidate() -> None:
    one, two = (list(itertools.islice(times(Poisson(rate=1), 8, 5), 100)) for _ in range(2))
    assert one == two == sorted(one)
    assert one != list(itertools.islice(times(Poisson(rate=1), 8, 6), 100))


def test_arrivals_are_read_by_kind() -> None:
    assert Workload.model_validate({"arrivals": "closed"}).arrivals == Closed()
    assert Workload.model_validate({"arrivals": {"kind": "gamma", "rate": 2}}).arrivals == Gamma(rate=2)
    with pytest.raises(ValueError, match="rate"):
        Workload.model_validate({"arrivals": "poisson"})


@pytest.mark.parametrize(("concurrency", "tokens"), [(1, 1), (1, 64), (4, 2), (8, 64), (300, 64)])
def test_stagger_is_within_the_length(concurrency: int, tokens: int) -> None:
    lengths = stagger(concurrency, tokens)
    assert len(lengths) == concurrency
    assert all(1 <= length <= tokens for length in lengths)
    assert list(lengths) == sorted(lengths)


@pytest.mark.parametrize(
    ("status", "headers", "least", "most"),
    [
        (200, {"retry-after": "9"}, 0, 0),
        (503, {"retry-after": "2"}, 2, 2),
        (429, {"retry-after": "99999"}, 1, 30),
        (429, {"retry-after": "soon"}, 0.001, 1),
        (500, {}, 0.001, 1),
    ],
)
def test_a_refusal_is_waited_out(status: int, headers: dict[str, str], least: float, most: float) -> None:
    assert least <= patience(Reply(0, 0, status, headers, ())) <= most


def test_a_process_that_ends_early_is_one_error(tmp_path: Path) -> None:
    path = prompts(tmp_path)
    work = Workload(prompts=JsonlPrompts(path=str(path)), output_tokens=12)
    target = Target(Endpoint("127.0.0.1", 1), make_requests(work, "m", 1))
    path.unlink()  # its processes read it anew
    with pytest.raises(LoadError, match="ended with status 1"):
        asyncio.run(run_level(target, Plan(2, work), processes=2))


def test_a_cancelled_level_leaves_no_connection(tmp_path: Path) -> None:
    server = Counting(seconds_per_token=5.0)
    requests = make_requests(Workload(prompts=JsonlPrompts(path=str(prompts(tmp_path))), output_tokens=12), "m", 1)

    async def run() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        async with listener:
            endpoint = Endpoint("127.0.0.1", listener.sockets[0].getsockname()[1])
            target = Target(endpoint, requests, stall=60)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await closed_loop(target, Gate(), slots=range(4), concurrency=4)
            tasks = [task for task in asyncio.all_tasks() if "slot" in repr(task)]
            assert tasks == []

    asyncio.run(run())
