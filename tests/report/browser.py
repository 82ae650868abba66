# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over its DevTools protocol: open a page, ask it, look at it."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import websocket

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PHONE = (390, 844)
DESKTOP = (1440, 900)
_START_SECONDS = 60


def program() -> str | None:
    """Path of a Chromium on this machine, None where there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium. Use as a context manager.

    console: what the page logged as a warning or an error, and what it threw, in order. requests: addresses
    that it asked for.
    """

    def __init__(self, profile: Path) -> None:
        self.console: list[str] = []
        self.requests: list[str] = []
        self._numbers = itertools.count(1)
        words = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        words += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen([str(program()), *words], stderr=subprocess.DEVNULL)
        try:
            self._socket = websocket.create_connection(
                self._address(profile / "DevToolsActivePort"), suppress_origin=True, timeout=60
            )
            for domain in ("Runtime", "Log", "Page", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._stop()

    def open(self, page: Path, anchor: str = "") -> None:
        """Load a file and wait until its own script has run."""
        self.console.clear()
        self.requests.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.as_uri() + (f"#{anchor}" if anchor else ""))
        self.wait("document.readyState === 'complete' && 'ready' in document.documentElement.dataset")

    def resize(self, size: tuple[int, int], *, dark: bool = False) -> None:
        """Take a phone's or a desktop's width and height in CSS px, and the light or dark scheme."""
        width, height = size
        mobile = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; raises AssertionError with what it threw."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.ask(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or with `whole` the page to its end, as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; events that come in between are kept."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._keep(message.get("method", ""), message.get("params", {}))

    def _keep(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.console.append(event["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("warning", "error", "assert"):
            self.console.append(str(event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("warning", "error"):
            self.console.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    def _address(self, port_file: Path) -> str:
        """The page's address, as soon as the browser has written down its port."""
        end = time.monotonic() + _START_SECONDS
        while not (port_file.exists() and "\n" in port_file.read_text()):
            assert self._process.poll() is None, "Chromium ended at its start"
            assert time.monotonic() < end, "Chromium does not start"
            time.sleep(0.05)
        port = port_file.read_text().split("\n")[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
            targets = json.load(answer)
        address: str = next(each["webSocketDebuggerUrl"] for each in targets if each["type"] == "page")
        return address

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
