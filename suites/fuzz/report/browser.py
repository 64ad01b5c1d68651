"""A headless Chromium, driven by its own protocol over a pair of pipes: no driver and no library are needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"),
    *("--remote-debugging-pipe", "--window-size=1280,1500", "--disable-background-networking"),
)


def installed() -> str | None:
    """The browser's path, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. Raises ``RuntimeError`` for what the browser refuses."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._pending = b""
        self._sent = 0
        self._session: str | None = None
        self.messages: list[str] = []
        """what the page logged, errors of scripts and of the policy included"""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something; what comes back."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._sent:
                break
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            received = os.read(self._receive, 1 << 16)
            if not received:
                raise RuntimeError("the browser ended")
            self._pending += received
        text, self._pending = self._pending.split(b"\0", 1)
        found: dict[str, Any] = json.loads(text)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        asked = event.get("params", {})
        match event.get("method"):
            case "Log.entryAdded":
                self.messages.append(asked["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.messages.append(asked["exceptionDetails"]["text"])
            case "Network.requestWillBeSent" if not asked["request"]["url"].startswith("file:"):
                self.messages.append(f"asked for {asked['request']['url']}")

    def show(self, page: Path, *, dark: bool = False, fragment: str = "") -> None:
        """Open a page, and wait until it is complete."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.as_uri() + fragment)
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def wait(self, condition: str, most_s: float = 20.0) -> None:
        """Until an expression is true. Raises ``TimeoutError``."""
        until = time.monotonic() + most_s
        while not self.run(condition):
            if time.monotonic() > until:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def press(self, key: str, text: str = "") -> None:
        """One key: down and up. ``text``: what it types."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowDown": 40}
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key) or ord(key.upper()[0])}
        typed = text or ("\r" if key == "Enter" else key if len(key) == 1 else "")
        down = {"type": "keyDown", "text": typed} if typed else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **shared)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


def _moved(descriptor: int) -> int:
    moved: int = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """A running browser, ended afterwards."""
    # Far from 3 and 4, which the browser's ends become.
    command_read, command_write = (_moved(end) for end in os.pipe())
    answer_read, answer_write = (_moved(end) for end in os.pipe())
    flags = [*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    wired = f'exec "$@" 3<&{command_read} 4>&{answer_write}'
    with tempfile.TemporaryDirectory(prefix="attn-oracle-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["bash", "-c", wired, "bash", program, *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(command_read, answer_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        try:
            yield Browser(command_write, answer_read)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(command_write)
            os.close(answer_read)
