"""A headless chromium that says what went wrong on a page, over its DevTools pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_SECONDS = 20  # for any answer
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-extensions --hide-scrollbars "
    "--disable-background-networking --disable-dev-shm-usage --remote-debugging-pipe"
)


class Browser:
    """One page of a chromium.

    Attributes:
        problems (list[str]): console errors and warnings, uncaught exceptions, and requests for
            anything but the page itself, those that its policy refuses too.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._last = write, read, b"", 0
        self._session: str | None = None
        self._loaded = False
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol and its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path, *, width: int = 1440, height: int = 900) -> None:
        """Loads a file and waits until its curves are drawn."""
        self._loaded = False
        self.problems.clear()
        self.size(width, height)
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._next()
        self.run("drawn")  # the promise of all curves

    def size(self, width: int, height: int) -> None:
        """Makes the window so many pixels large."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, or what its promise gives."""
        how = {"returnByValue": True, "awaitPromise": True, "allowUnsafeEvalBlockedByCSP": False}
        answer = self.call("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path, **clip: float) -> None:
        """A PNG of the whole page, or of ``x``, ``y``, ``width`` and ``height`` in it."""
        extra = {"clip": {"scale": 1, **clip}} if clip else {}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, **extra)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], end - time.monotonic())
            assert ready, f"chromium has not answered for {_SECONDS} s"
            self._buffer += os.read(self._read, 1 << 20)
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {params['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.problems.append(f"log: {params['entry']}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(f"console: {params['args']}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if params.get("type") != "Document" and not url.startswith("data:"):
                self.problems.append(f"request: {url}")


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Starts chromium with a profile of its own, and ends it."""
    assert CHROMIUM is not None
    commands, answers = os.pipe(), os.pipe()
    process = subprocess.Popen(
        # The protocol wants its pipe at 3 and 4.
        ["bash", "-c", f'exec "$0" {_FLAGS} "$@" 3<&{commands[0]} 4>&{answers[1]}', CHROMIUM]
        + [f"--user-data-dir={profile}"],
        pass_fds=(commands[0], answers[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands[0])
    os.close(answers[1])
    try:
        yield Browser(commands[1], answers[0])
    finally:
        process.kill()
        process.wait()
        os.close(commands[1])
        os.close(answers[0])
