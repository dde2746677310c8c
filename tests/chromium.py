"""A headless Chromium for tests, driven over a pipe by its DevTools protocol: no driver, no download, no network."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ABSENT = "no Chromium on this machine (Debian: apt-get install chromium): the page is checked as text alone"
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions"
    " --disable-background-networking --disable-component-update --disable-sync --hide-scrollbars"
    " --remote-debugging-pipe --force-device-scale-factor=1"
).split()
_JOIN = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
_ANSWER_WITHIN_S = 60.0


class Browser:
    """One tab. What the page requested, logged and threw is kept from the start."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        assert BINARY is not None, ABSENT
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loaded = False
        self._buffer = b""
        self._number = 0
        self._session = ""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = self._start([BINARY, *_FLAGS, f"--user-data-dir={self._profile.name}"])
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def _start(self, words: list[str]) -> "subprocess.Popen[bytes]":
        """Chromium reads commands from its descriptor 3 and answers on 4."""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        joined = [sys.executable, "-c", _JOIN, str(theirs_in), str(theirs_out), *words]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(joined, pass_fds=(theirs_in, theirs_out), **quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command and its answer; what happens meanwhile is noted."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], _ANSWER_WITHIN_S)
            assert ready, "Chromium does not answer"
            chunk = os.read(self._in, 1 << 16)
            assert chunk, "Chromium ended"
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, what: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(what["exceptionDetails"]))
        elif event in ("Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(what))
        elif event == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {what['message']}")
        elif event == "Page.loadEventFired":
            self._loaded = True

    def open(self, page: Path) -> None:
        """Open a file and wait until it is drawn."""
        self._loaded = False
        self.call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._receive()
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """The size of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """The reader's wish: "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.settle()

    def press(self, key: str) -> None:
        """A key, on whatever has the focus."""
        words = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **words)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press at a point, move to another, let go."""
        for kind, (x, y), buttons in (("mousePressed", start, 1), ("mouseMoved", end, 1), ("mouseReleased", end, 0)):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=buttons, clickCount=1)
        self.settle()

    def hover(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def picture(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """The page as PNG: the window, or all of it."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        found = base64.b64decode(shot["data"])
        if path is not None:
            path.write_bytes(found)
        return found
