"""A limit of processes and threads (`ulimit -u`) that the server or its workers reach."""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.inference import one
from harness.models import copy_models
from harness.server import Server, binary
from harness.waiting import eventually, run_for

PROCESSORS = len(os.sched_getaffinity(0))
USER = 65533
"""A user without other processes."""
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
MISSING = [name for name in ("setpriv", "prlimit") if not shutil.which(name)]
WHY_NOT = f"not installed: {', '.join(MISSING)}" if MISSING else "" if os.geteuid() == 0 else "needs root to start processes of another user"
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
REASON = "Resource temporarily unavailable"
REMEDY = "Raise the limit of processes and threads"
ENDED = ("READY", "UNAVAILABLE")
LIMITS = [2, 3, 5, 9, *range(10 + PROCESSORS, 24 + PROCESSORS), 40 + PROCESSORS]


class Limited(Server):
    """A server of a user that may have a limited number of processes and threads."""

    def __init__(self, folder, programs, models, limit: int):
        super().__init__(folder, [models], ["--exit-on-error=false"])
        self.command[0] = str(programs / "pharos")
        self.command = [*AS_USER, "prlimit", f"--nproc={limit}", *self.command]
        self.logs = folder / "logs"
        self.environment = {"HOME": str(folder), "TMPDIR": str(folder)}

    def entries(self) -> list:
        """Returns the versions of the model in the index; none if no thread could be started to read the repository."""
        status, text = self.ask("POST", "/v2/repository/index", b"")
        if status == 200:
            return json.loads(text)
        assert status == 500 and f"cannot read the model repositories: no thread can be started. {REMEDY}" in text, (status, text)
        assert REASON in self.log_path.read_text()
        return []

    def answers(self) -> bool:
        """Returns whether the server is live; fails if it ended with a panic or without a reason."""
        if self.process.poll() is not None:
            log = self.log_path.read_text()
            assert self.process.returncode == 1 and "panicked" not in log, log
            assert "cannot start" in log and REMEDY in log and REASON in log, log
            return False
        try:
            return self.get("/v2/health/live")[0] == 200
        except OSError:
            return False


def processes_of_the_user() -> list:
    """Returns the processes of the user with the limit."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # It may end meanwhile.
        with contextlib.suppress(OSError):
            found += [folder.name] if folder.stat().st_uid == USER else []
    return found


@pytest.fixture
def place(open_path):
    """Programs and models that the other user can read, and a folder that it can write to."""
    for name in ("pharos", "pharos-worker"):
        shutil.copy(binary().with_name(name), open_path)
    copy_models(open_path / "models", ["identity_fp32"])
    (open_path / "writable").mkdir()
    os.chown(open_path / "writable", USER, USER)
    return open_path


def not_refused(status: int, answer: dict) -> tuple:
    """Returns an answer, or None for that of a server whose start has not ended."""
    return None if answer.get("error") == "Server not ready" else (status, answer)


def of_model(server) -> str:
    """Returns whether the model is loaded; if not, its reason is the limit."""
    (entry,) = eventually("the load has ended", lambda: [entry for entry in server.entries() if entry.get("state") in ENDED])
    if entry["state"] == "READY":
        # The model can be ready shortly before the start has ended.
        answered = lambda: not_refused(*server.infer("identity_fp32", one("FP32", [1, 1], [1])))  # noqa: E731
        status, answer = eventually("the start has ended", answered)
        assert status == 200, answer
        return "loaded"
    assert REASON in entry["reason"], entry
    return "not loaded"


def test_every_limit_gives_a_reason_or_a_server(place):
    """Below some limit the server exits with the reason; above it, models may fail to load with the reason; then all works."""
    outcomes = []
    for limit in LIMITS:
        server = Limited(place / "writable", place, place / "models", limit)
        server.launch()
        try:
            eventually("the server is live or has ended", lambda: server.answers() or server.process.poll() is not None)
            outcomes.append("ended" if server.process.poll() is not None else of_model(server))
        finally:
            if server.process.poll() is None:
                server.kill()
            # They count to the limit of the next server.
            eventually("its processes have ended", lambda: not processes_of_the_user())
    order = ["ended", "not loaded", "loaded"]
    assert outcomes == sorted(outcomes, key=order.index) and outcomes[0] == "ended" and outcomes[-1] == "loaded", outcomes


def test_requests_that_need_another_thread_get_the_reason(place):
    """When the limit is reached while the server runs. Other requests on the same connection are answered, and everything works
    when the limit is raised."""
    server = Limited(place / "writable", place, place / "models", 1000)
    server.launch()
    try:
        server.wait_until_ready()

        def limit(count: int):
            subprocess.run([*AS_USER, "prlimit", f"--pid={server.process.pid}", f"--nproc={count}:1000"], check=True)

        limit(1)
        run_for("threads for blocking calls end when they have had none for 10 s", 12)
        with contextlib.closing(server.connect()) as connection:

            def ask(method: str, path: str) -> tuple:
                connection.request(method, path, b"" if method == "POST" else None)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()

            status, text = ask("POST", "/v2/repository/index")
            assert status == 500 and f"cannot read the model repositories: no thread can be started. {REMEDY}" in text, (status, text)
            assert ask("POST", "/v2/repository/index")[0] == 500
            log = server.log.read_text()
            warnings = [line for line in log.splitlines() if " WARN " in line and "no thread can be started" in line]
            assert len(warnings) == 1 and REMEDY in warnings[0] and REASON in warnings[0], server.log_tail()
            assert "panicked" not in log, "a panic stops an event loop while its backtrace is made"
            assert ask("GET", "/v2/health/ready")[0] == 200
            assert server.infer("identity_fp32", one("FP32", [1, 1], [1]))[0] == 200
            limit(1000)
            assert ask("POST", "/v2/repository/index")[0] == 200
    finally:
        server.kill()
        eventually("its processes have ended", lambda: not processes_of_the_user())
