"""A server with simulated GPUs."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.fake_gpus import Gpus
from harness.server import Server, total
from harness.waiting import eventually
from python_backend.worker import CODE, PYTHON

REQUEST = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [0]}]}
TWO = """
* devices 2
* driver 550.54.15
0 uuid GPU-a
0 memory 1000 600
1 uuid GPU-b
1 memory 1000 100
"""
CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


class World:
    """A server with simulated GPUs, and a repository of models that report their placement."""

    def __init__(self, folder: Path):
        self.folder, self.models, self.server = folder, folder / "models", None
        self.models.mkdir()
        (folder / "nvml").mkdir()
        self.gpus = Gpus(folder / "nvml")
        self.environment = {}

    def model(self, name: str, groups="", config=CONFIG):
        """Writes a model with these instance groups; without a configuration file if `config` is empty."""
        version = self.models / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        if not (version / "model.py").exists():
            shutil.copy(CODE / "own_placed.py", version / "model.py")
        if config:
            (version.parent / "config.pbtxt").write_text(f"{config}\n{groups}\n")

    def start(self, devices: str, *options, wait=True):
        """Starts the server with these devices."""
        self.gpus.tell(devices)
        options = [self.gpus.option(), f"--python={PYTHON}", "--exit-on-error=false", *options]
        self.server = Server(self.folder, [self.models], options)
        self.server.environment |= self.environment
        self.server.launch()
        if wait:
            self.server.wait_until_ready()
        return self.server

    def places(self, name: str, count: int) -> dict:
        """Waits until `count` or more instances of a model have answered; returns the placement of each by its name."""
        found = {}

        def ask(_):
            status, answer = self.server.infer(name, REQUEST)
            assert status == 200, answer
            return json.loads(answer["outputs"][0]["data"][0])

        def all_have_answered():
            with ThreadPoolExecutor(2 * count) as clients:
                found.update({place["instance"]: place for place in clients.map(ask, range(2 * count))})
            return len(found) >= count

        eventually(f"{count} instances have answered", all_have_answered)
        return found

    def groups(self, name: str) -> list:
        """Returns the instance groups of the served configuration."""
        status, text = self.server.get(f"/v2/models/{name}/config")
        assert status == 200, text
        return json.loads(text)["instance_group"]

    def reason(self, name: str) -> str:
        """Returns the reason in the repository index why a model is not served."""
        (entry,) = self.server.index()[name]
        assert entry["state"] == "UNAVAILABLE", entry
        return entry["reason"]

    def pinned(self) -> tuple:
        """Returns the size of the pool of pinned memory, and the bytes in use."""
        scrape = self.server.scrape()
        return tuple(total(scrape, f"nv_pinned_memory_pool_{what}_bytes") for what in ("total", "used"))
