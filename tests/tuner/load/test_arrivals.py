from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from tests.tuner.running import prompts
from tuner.load.arrivals import Run, closed_loop, enough, stagger
from tuner.load.client import Endpoint
from tuner.load.streams import Completion, read_completion
from tuner.load.workload import Requests, make_requests
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


def load(server: Counting, folder: Path, concurrency: int, window: float, first: int = 0) -> tuple[Run, Requests]:
    requests = make_requests(Workload(prompts=str(prompts(folder)), output_tokens=12), "m", 1)

    async def run() -> Run:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        async with listener:
            endpoint = Endpoint("127.0.0.1", listener.sockets[0].getsockname()[1])
            return await closed_loop(endpoint, requests, concurrency=concurrency, window=window, stall=20, first=first)

    return asyncio.run(run()), requests


@pytest.mark.parametrize("concurrency", [1, 2, 7])
def test_a_level_keeps_its_concurrency_and_counts_whole_requests(tmp_path: Path, concurrency: int) -> None:
    server = Counting()
    run, requests = load(server, tmp_path, concurrency, window=0.15, first=5)
    assert server.most == concurrency
    assert len(run.exchanges) >= enough(concurrency)
    for exchange in run.exchanges:
        completion = read_completion(exchange.reply)
        assert isinstance(completion, Completion)
        assert completion.output_tokens == 12
        assert run.opened <= exchange.due <= run.closed
        assert exchange.due <= exchange.reply.sent <= completion.arrivals[0].time
        assert exchange.request == requests.make(exchange.index)
    indexes = [exchange.index for exchange in run.exchanges]
    assert len(set(indexes)) == len(indexes)
    assert min(indexes) >= 5 + concurrency  # the first of each slot is its warm-up


def test_a_slot_sends_when_it_is_free(tmp_path: Path) -> None:
    run, _ = load(Counting(), tmp_path, 2, window=0.15)
    for slot in range(2):
        mine = [exchange for exchange in run.exchanges if exchange.slot == slot]
        for before, after in itertools.pairwise(mine):
            assert after.due == before.reply.done


def test_a_short_window_still_counts_enough(tmp_path: Path) -> None:
    run, _ = load(Counting(), tmp_path, 3, window=0.0)
    assert len(run.exchanges) >= enough(3)


def test_slots_are_spread_over_a_request(tmp_path: Path) -> None:
    server = Counting()
    load(server, tmp_path, 3, window=0.0)
    assert [body["max_tokens"] for body in server.bodies[:3]] == [3, 6, 9]
    assert {body["max_tokens"] for body in server.bodies[3:]} == {12}


@pytest.mark.parametrize(("concurrency", "tokens"), [(1, 1), (1, 64), (4, 2), (8, 64), (300, 64)])
def test_stagger_is_within_the_length(concurrency: int, tokens: int) -> None:
    lengths = stagger(concurrency, tokens)
    assert len(lengths) == concurrency
    assert all(1 <= length <= tokens for length in lengths)
    assert list(lengths) == sorted(lengths)


def test_a_cancelled_level_leaves_no_connection(tmp_path: Path) -> None:
    server = Counting(seconds_per_token=5.0)
    requests = make_requests(Workload(prompts=str(prompts(tmp_path)), output_tokens=12), "m", 1)

    async def run() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        async with listener:
            endpoint = Endpoint("127.0.0.1", listener.sockets[0].getsockname()[1])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await closed_loop(endpoint, requests, concurrency=4, window=1, stall=60)
            assert server.active == 4 or len(server.bodies) == 4
            tasks = [task for task in asyncio.all_tasks() if "slot" in repr(task)]
            assert tasks == []

    asyncio.run(run())
