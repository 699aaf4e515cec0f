"""A headless Chromium that is told what to do over two pipes (`--remote-debugging-pipe`): no port, no other package.

The protocol: https://chromedevtools.github.io/devtools-protocol/, one JSON object a message, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LIMIT_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The browser of this machine, as Debian and others call it."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@dataclass
class Tab:
    """One page. What it said on its console and what it asked for are kept from page to page, until `forget`."""

    browser: Browser
    session: str
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def open(self, page: Path, anchor: str = "") -> None:
        """Open a file, and wait until it has loaded."""
        self.browser.loaded.discard(self.session)
        answer = self.call("Page.navigate", url=page.as_uri() + anchor)
        assert "errorText" not in answer, answer
        self.wait()

    def wait(self) -> None:
        self.browser.pump_until(lambda: self.session in self.browser.loaded)

    def look(self, expression: str) -> Any:
        """What an expression is, as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def follow(self, selector: str) -> None:
        """Press a link, and wait for where it leads."""
        self.browser.loaded.discard(self.session)
        self.look(f"document.querySelector({json.dumps(selector)}).click()")
        self.wait()

    def resize(self, width: int, height: int = 900, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def take_medium(self, medium: str = "", *, dark: bool = False) -> None:
        """Show it as in print, or in the dark; as on a screen without either."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def picture(self, file: Path) -> None:
        """A picture of what the window shows."""
        answer = self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    def print(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])


class Browser:
    """The process, and its two pipes."""

    def __init__(self, process: subprocess.Popen[bytes], out: int, into: int) -> None:
        self.process = process
        self.loaded: set[str] = set()
        self._out, self._into = out, into
        self._buffer = b""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._into, json.dumps(message).encode() + b"\0")
        self.pump_until(lambda: number in self._answers)
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def tab(self) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        return tab

    def pump_until(self, is_so: Any) -> None:
        """Take messages until something is so."""
        until = time.monotonic() + _LIMIT_S
        while not is_so():
            ready, _, _ = select.select([self._out], [], [], max(until - time.monotonic(), 0))
            assert ready, "the browser says nothing any more"
            read = os.read(self._out, 1 << 20)
            assert read, "the browser has ended"
            *whole, self._buffer = (self._buffer + read).split(b"\0")
            for text in whole:
                self._take(json.loads(text))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
            return
        session, values = message.get("sessionId", ""), message.get("params", {})
        tab = self._tabs.get(session)
        match message["method"]:
            case "Page.loadEventFired":
                self.loaded.add(session)
            case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded" if tab:
                tab.said.append(json.dumps(values))
            case "Network.requestWillBeSent" if tab:
                tab.asked.append(values["request"]["url"])


@contextmanager
def run_chromium(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, ended with the block."""
    into_read, into_write = os.pipe()
    out_read, out_write = os.pipe()
    options = (
        "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    )  # fmt: skip
    # The browser reads from 3 and writes to 4: a Python puts them there, out of each other's way, and is it then.
    take_place = (
        "import os, sys\n"
        "ends = [os.dup2(int(end), 100 + place) for place, end in enumerate(sys.argv[1:3])]\n"
        "os.dup2(ends[0], 3), os.dup2(ends[1], 4)\n"
        "os.execv(sys.argv[3], sys.argv[3:])\n"
    )
    ends = [str(into_read), str(out_write)]
    command = [sys.executable, "-c", take_place, *ends, program, *options, "about:blank"]
    process = subprocess.Popen(
        command, pass_fds=(into_read, out_write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(into_read)
    os.close(out_write)
    try:
        yield Browser(process, out_read, into_write)
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(out_read)
        os.close(into_write)
