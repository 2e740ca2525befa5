"""A headless Chromium, driven through its pipe (the DevTools protocol): what a person would see, click and press."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.support.until import until

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COMMAND = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
)
COMPLAINTS = (
    "Runtime.exceptionThrown",
    "Runtime.consoleAPICalled",
    "Log.entryAdded",
    "Page.javascriptDialogOpening",
)


def program() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page. `complaints` are the console's lines, exceptions and dialogs; `requests` all that was fetched."""

    def __init__(self) -> None:
        self.complaints: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self._number = 0
        self._session: str | None = None
        self._rest = b""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def to_3_and_4() -> None:  # where Chromium reads and writes; first out of each other's way
            reads, writes = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        self._process = subprocess.Popen(
            [str(program()), *COMMAND.split(), f"--user-data-dir={self._profile.name}"],
            preexec_fn=to_3_and_4,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def open(self, path: Path) -> None:
        self._call("Page.navigate", url=path.as_uri())
        loaded = "document.readyState == 'complete' && location.protocol == 'file:'"
        until(lambda: self.value(loaded))

    def value(self, expression: str) -> Any:
        """Of an expression of JavaScript; a promise is waited for."""
        told = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def click(self, element: str) -> None:
        """With the mouse, on the middle of what the expression is."""
        self.value(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.value(
            f"(({{x, y, width, height}}) => ({{x: x + width / 2, y: y + height / 2}}))"
            f"({element}.getBoundingClientRect().toJSON())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)
        self.value("new Promise((done) => setTimeout(done, 50))")

    def printed_width(self, pixels: int) -> int:
        """How wide the page is on paper of that width."""
        self._call("Emulation.setEmulatedMedia", media="print")
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=pixels,
            height=pixels,
            deviceScaleFactor=1,
            mobile=False,
        )
        return self.value("document.documentElement.scrollWidth")

    def width(self, pixels: int) -> int:
        """How wide the page is in a window of that width."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=False
        )
        return self.value("document.documentElement.scrollWidth")

    def scheme(self, name: str) -> None:
        """Prefer light or dark."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def write(self, text: str) -> None:
        """Type where the focus is."""
        self._call("Input.insertText", text=text)

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, **key)

    def _call(self, name: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": name, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("method") in COMPLAINTS:
                self.complaints.append(told)
            if told.get("method") == "Network.requestWillBeSent":
                self.requests.append(told["params"]["request"]["url"])
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has gone"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
