"""The engine process around device rounds: the frames of a whole life, over a real socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from engine import start, worker
from engine.bench import run_requests
from engine.config import EngineConfig
from engine.device.build import build_device
from engine.loop import Loop
from engine.runtime import build, resolve
from engine.wire import Ask, Cancel, DraftSet, Drain, Frame, Info, Ready, SetDraft, Submit, Tokens
from tests.engine.test_speculate import SMOKE, smoke_prompts

SECONDS = 60.0
CHAIN = {"kind": "dflash", "model": str(SMOKE / "draft"), "block_size": 6}


def until(channel: worker.Channel, frames: list[Frame], enough: Callable[[], bool]) -> None:
    """Receive until there is enough, within a bound."""
    deadline = time.monotonic() + SECONDS
    while not enough():
        assert time.monotonic() < deadline, frames
        frames += channel.receive(1.0)


def test_frames_of_a_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready, texts, a cancelled request, another draft, counters, and an end when told to drain."""
    model = {"target": str(SMOKE / "target"), "dtype": "float32", "max_len": 160}
    config = EngineConfig.model_validate({"model": model, "draft": CHAIN, "memory": {"max_running": 3}})
    monkeypatch.setattr(start, "build_any", build_device)  # what a GPU's plan gets
    prompts = smoke_prompts(4)
    expected = run_requests(Loop(build(resolve(config))), prompts, 30).outputs
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = threading.Thread(target=worker.run, args=(worker.Channel(theirs), config))
        server.start()
        channel, frames = worker.Channel(ours), list[Frame]()
        until(channel, frames, lambda: any(isinstance(frame, Ready) for frame in frames))
        channel.send(*(Submit(number, prompt, 30, ()) for number, prompt in enumerate(prompts)))
        channel.send(Submit(9, prompts[0], 1000, ()), Cancel(9), Submit(10, prompts[0], 60, ()), Cancel(10))
        channel.send(SetDraft(1, {"kind": "none"}), SetDraft(2, {"kind": "dflash", "block_size": 64}))

        def texts() -> list[Tokens]:
            return [frame for frame in frames if isinstance(frame, Tokens)]

        until(channel, frames, lambda: sum(frame.finish == "length" for frame in texts()) == 4)
        channel.send(Ask(3), Drain())
        until(channel, frames, lambda: any(isinstance(frame, Info) for frame in frames))
        server.join(SECONDS)
        assert not server.is_alive()
    made = {number: [t for frame in texts() if frame.id == number for t in frame.tokens] for number in range(4)}
    assert [tuple(text) for text in made.values()] == list(expected)
    refused = [frame for frame in texts() if frame.finish == "error"]
    assert [frame.id for frame in refused] == [9]
    assert "lower max_tokens" in (refused[0].error or "")
    [off, too_large] = [frame for frame in frames if isinstance(frame, DraftSet)]
    assert (off.error, "rows a round" in (too_large.error or "")) == (None, True)
    [info] = [frame for frame in frames if isinstance(frame, Info)]
    assert (info.stats["running"], info.stats["waiting"], info.stats["tokens_used"]) == (0, 0, 0)
