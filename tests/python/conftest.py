"""Fixtures: the server that most tests share, separate servers for single tests, and a directory that other users can reach."""

import contextlib
import shutil
import tempfile
from pathlib import Path

import pytest

from harness.models import copy_models
from harness.server import EXAMPLES, Server, binary, kill_all


def pytest_report_header(config):
    """Names the executable that is tested."""
    return f"server: {binary()}"


@pytest.fixture(scope="session", autouse=True)
def executable():
    """Ends the run with one message if an executable is missing, so that the tests do not fail one by one; places the worker of the
    backend `test`."""
    if not binary().exists():
        pytest.exit(f"{binary()} does not exist: build it with `cargo build --release`, or set PHAROS_BIN", 2)
    program = binary().with_name("pharos-worker-test")
    if not program.exists():
        pytest.exit(f"{program} does not exist: build it with `make test-workers`", 2)
    # The server searches for backends beside its executable.
    place = binary().with_name("backends") / "test" / program.name
    place.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        place.symlink_to(f"../../{program.name}")


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server that serves the examples and all test models."""
    folder = tmp_path_factory.mktemp("shared")
    with Server(folder, [EXAMPLES, copy_models(folder / "models")]) as running:
        yield running


@pytest.fixture
def open_path():
    """A directory that every user can reach, unlike `tmp_path`; it is removed at the end of the test."""
    is_open = lambda folder: all(above.stat().st_mode & 0o001 for above in (folder, *folder.parents))  # noqa: E731
    parent = next(folder for folder in (Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")) if is_open(folder))
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="pytest-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start(tmp_path):
    """Starts a separate server for one test: `start(["model", ...], *options)`. It is stopped at the end of the test."""
    started = []

    def begin(names, *options, repository=None, wait=True, environment=None):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        running = Server(folder, [repository or copy_models(folder / "models", names)], options)
        running.environment |= environment or {}
        started.append(running)
        running.launch()
        if wait:
            running.wait_until_ready()
        return running

    yield begin
    kill_all(started)
