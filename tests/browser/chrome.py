"""A headless Chromium, driven over its debugging pipe: no driver program and no package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

DEADLINE = 60.0  # far beyond what anything here takes, even on a busy machine
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)


def chromium() -> str | None:
    """Return the browser's program, None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class BrowserError(AssertionError):
    """The browser said no, or nothing."""


class Browser:
    """One Chromium with an empty profile; use as a context."""

    def __enter__(self) -> Self:
        program = chromium()
        if program is None:
            raise BrowserError("no Chromium on this machine")
        self._profile = tempfile.TemporaryDirectory(prefix="tuner-chromium-")
        to_browser, self._out = _pipe()
        self._in, from_browser = _pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4.
        command = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", program, *FLAGS]
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.send("Browser.close")
        except BrowserError:
            self._process.kill()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._log.close()
        self._profile.cleanup()

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result.

        Raises:
            BrowserError: it is refused, or not answered.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        try:
            os.write(self._out, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise BrowserError(f"{method}: the browser is gone: {self._words()}") from None
        end = time.monotonic() + DEADLINE
        while True:
            answer = self._receive(end, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self, end: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise BrowserError(f"{what}: no answer: {self._words()}")
            data = os.read(self._in, 2**20)
            if not data:
                raise BrowserError(f"{what}: the browser is gone: {self._words()}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")[-800:]

    def page(self, width: int = 1366, height: int = 768, *, dark: bool = False) -> Page:
        """Open an empty page of this size."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        page.scheme(dark=dark)
        return page


class Page:
    """One page; its scripts' errors are kept."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self._context = context
        self._session = session

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command about this page."""
        return self._browser.send(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        """Set the size of what is seen."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, *, dark: bool) -> None:
        """Say what the system prefers."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def go(self, url: str, ready: str = "document.readyState === 'complete'") -> None:
        """Open an address, or follow one of this page, and wait until a condition holds."""
        answer = self.send("Page.navigate", url=url)
        if "errorText" in answer:
            raise BrowserError(f"{url}: {answer['errorText']}")
        self.wait(ready)

    def run(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited.

        Raises:
            BrowserError: it throws.
        """
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait(self, condition: str, deadline: float = DEADLINE) -> Any:
        """Wait until an expression is true, and return it."""
        end = time.monotonic() + deadline
        trouble = ""
        while True:
            try:
                if value := self.run(condition):
                    return value
            except BrowserError as error:  # the page may just be another one
                trouble = f" ({error})"
            if time.monotonic() > end:
                body = self.run("document.body ? document.body.innerText.slice(0, 600) : ''")
                raise BrowserError(f"not within {deadline:g} s: {condition}{trouble}\n{body}\n{self.errors()}")
            time.sleep(0.02)

    def text(self, selector: str = "body") -> str:
        """Return what a reader sees of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Click an element."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def mouse(self, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
        """Move the mouse, press or release it."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Drag with the left button, in a few steps as a hand does."""
        self.mouse(x, y)
        self.mouse(x, y, "mousePressed", button="left", buttons=1, clickCount=1)
        for i in range(1, 6):
            self.mouse(x + (to_x - x) * i / 5, y + (to_y - y) * i / 5, button="left", buttons=1)
        self.mouse(to_x, to_y, "mouseReleased", button="left", clickCount=1)

    def close(self) -> None:
        """Close the page, and forget what it said."""
        self._browser.send("Target.disposeBrowserContext", browserContextId=self._context)
        self._browser.events = [e for e in self._browser.events if e.get("sessionId") != self._session]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Keep a picture of what is seen, or of the whole page."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def errors(self) -> list[str]:
        """Return what scripts threw, what was refused and what failed to load so far."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            parameters = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                found.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        return found

    def requests(self) -> list[str]:
        """Return every address that was asked for so far."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"
        ]


def _pipe() -> tuple[int, int]:
    """Return a pipe with numbers that the shell's redirections do not meet."""
    read, write = os.pipe()
    high = tuple(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (read, write))
    os.close(read)
    os.close(write)
    return high[0], high[1]
