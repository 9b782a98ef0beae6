"""A headless Chromium, driven over its debugging protocol (https://chromedevtools.github.io/devtools-protocol/).

`PHAROS_CHROMIUM` names the program; `none` skips these tests. Without the variable, the program is searched for on the PATH.
"""

import asyncio
import base64
import os
import shutil
import subprocess
from pathlib import Path

import aiohttp

from harness.peers import wait_or_kill
from harness.waiting import eventually, every

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
]


def program() -> str | None:
    """Returns the browser's path, or None."""
    named = os.environ.get("PHAROS_CHROMIUM")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)


def missing() -> str:
    """Returns why no browser can be used; empty if one can."""
    return "" if program() else "no chromium on the PATH (Debian: apt-get install chromium), or PHAROS_CHROMIUM names none"


class Browser:
    """One page. `complaints` holds the errors that it logs and the exceptions of its scripts. Use it with `with`."""

    def __init__(self, folder: Path, width=1440, height=1000):
        self.folder, self.size = folder, (width, height)
        self.complaints, self.number = [], 0
        self.loop = asyncio.new_event_loop()

    def __enter__(self):
        command = [program(), *ARGUMENTS, f"--user-data-dir={self.folder}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = self.folder / "DevToolsActivePort"
        try:
            lines = eventually("the browser listens", lambda: port.exists() and port.read_text().split())
            self.loop.run_until_complete(self.connect(lines[0]))
            for domain in ("Runtime", "Log", "Page"):
                self.call(f"{domain}.enable")
            width, height = self.size
            self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_):
        self.loop.run_until_complete(self.session.close())
        self.end()

    def end(self):
        """Terminates the process, and with it its children."""
        self.process.terminate()
        wait_or_kill(self.process, 10)
        self.loop.close()

    async def connect(self, port: str):
        self.session = aiohttp.ClientSession()
        async with self.session.get(f"http://127.0.0.1:{port}/json") as answer:
            pages = [target for target in await answer.json() if target["type"] == "page"]
        self.socket = await self.session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)

    def call(self, method: str, **parameters) -> dict:
        """Calls a method of the protocol and waits for its result; stores the complaints that arrive before the result."""
        return self.loop.run_until_complete(asyncio.wait_for(self.exchange(method, parameters), 30))

    async def exchange(self, method: str, parameters: dict) -> dict:
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while True:
            message = await self.socket.receive_json()
            if message.get("id") == self.number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self.note(message.get("method"), message.get("params", {}))

    def note(self, event: str, details: dict):
        """Stores exceptions, refused resources, policy violations, and errors and warnings that the console receives."""
        if event == "Runtime.exceptionThrown":
            shown = details["exceptionDetails"]
            self.complaints.append(shown.get("exception", {}).get("description") or shown["text"])
        elif event == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([argument.get("value") for argument in details["args"]]))

    def open(self, url: str, scheme="light"):
        """Loads a page with the preferred colour scheme `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        eventually("the page is loaded", lambda: self.ask("document.readyState") == "complete")

    def ask(self, expression: str):
        """Returns the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def press(self, key: str):
        """Presses and releases a key, by its name in the protocol: Tab, Enter."""
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def picture(self, path: Path):
        """Writes the visible part of the page as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def wait(self, seconds: float):
        """Lets the page run, and stores its complaints."""
        for _ in every(0.1, seconds):
            self.ask("1")
