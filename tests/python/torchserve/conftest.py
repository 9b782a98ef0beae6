"""Fixtures of the tests of TorchServe's interface."""

import pytest

from torchserve.launched import NO_ARCHIVER, WHY_NOT
from torchserve.launcher import COMMANDS, Launcher


@pytest.fixture(params=COMMANDS)
def launcher(request, tmp_path):
    """Each launcher; the servers that it has started are stopped."""
    if NO_ARCHIVER or (request.param == "torchserve" and WHY_NOT):
        pytest.skip(NO_ARCHIVER or WHY_NOT)
    made = Launcher(tmp_path / "own", *COMMANDS[request.param]())
    yield made
    if (made.folder / "tmp/.model_server.pid").exists():
        made.run("--stop", "--foreground")
