"""The archives of `archives/`, packed with PyPI's torch-model-archiver, as a model store for TorchServe and for this
server."""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from harness.waiting import DEADLINE_S
from torchserve.peer import PEER_PYTHON, torch_folder

SOURCES = Path(__file__).resolve().parent / "archives"
ARCHIVER = "torch-model-archiver"


@dataclass(frozen=True)
class Archive:
    """One archive: the name of its model, the folder of its sources, the options of the archiver, and the forms in which it is
    packed. `store` is its model store: the server loads the archives of `start` when it starts."""

    name: str
    source: str = ""
    handler: str = "handler.py"
    version: str = "1.0"
    form: str = "default"
    config: bool = False
    extra: tuple = ()
    store: str = "start"
    options: tuple = ()
    file: str = ""

    def folder(self) -> Path:
        """The folder of its sources."""
        return SOURCES / (self.source or self.name)


ARCHIVES = [
    Archive("echo"),
    Archive("entry", handler="functions.py"),
    Archive("acting", config=True),
    Archive("facts", config=True, extra=("labels.txt",), version="1.11"),
    Archive("metered"),
    Archive("batched", config=True),
    Archive("streaming"),
    Archive("refusing"),
    Archive("hostile", config=True),
    Archive("slow", config=True),
    Archive("based", config=True),
    Archive("counting", config=True),
    Archive("later", "entry", store="later", handler="functions.py", version="2.0", file="later2"),
    Archive("later", "entry", store="later", handler="functions.py"),
    Archive("zipped", "echo", form="tgz", store="later"),
    Archive("broken", store="later"),
    Archive("two_classes", store="later"),
    Archive("enveloped", store="envelope"),
    Archive("tiny", store="torch"),
    Archive("tiny_script", "tiny", store="torch"),
]


def of(store: str) -> list:
    """Returns the archives of a store. Archives that are only registered by request are in the store of the start."""
    return [archive for archive in ARCHIVES if archive.store == store]


@lru_cache(maxsize=1)
def archiver() -> tuple:
    """Returns the interpreter with torch-model-archiver (that of the tests, or of the installed TorchServe), and the reason if
    it is missing."""
    if importlib.util.find_spec("model_archiver"):
        return sys.executable, ""
    if PEER_PYTHON.exists():
        return str(PEER_PYTHON), ""
    return "", f"{sys.executable} has no {ARCHIVER}: '{sys.executable} -m pip install {ARCHIVER}'"


def make(archive: Archive, folder: Path, weights: Path | None = None):
    """Packs an archive into `folder`; `weights` holds the files of the torch models."""
    source = archive.folder()
    command = [archiver()[0], "-m", "model_archiver.model_packaging", "--force", f"--export-path={folder}"]
    command += [f"--model-name={archive.name}", f"--version={archive.version}"]
    command += [f"--handler={source / archive.handler}", f"--archive-format={archive.form}", *archive.options]
    if archive.config:
        command.append(f"--config-file={source / 'model-config.yaml'}")
    if archive.extra:
        command.append("--extra-files=" + ",".join(str(source / name) for name in archive.extra))
    if archive.source == "tiny" or archive.name == "tiny":
        script = archive.name == "tiny_script"
        command.append(f"--serialized-file={weights / ('script.pt' if script else 'weights.pt')}")
        command += [] if script else [f"--model-file={source / 'model.py'}"]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
    if archive.file:
        (folder / f"{archive.name}.mar").rename(folder / f"{archive.file}.mar")


WEIGHTS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from model import Tiny
tiny = Tiny()
with torch.no_grad():
    tiny.line.weight.fill_(2.0)
    tiny.line.bias.fill_(1.0)
torch.save(tiny.state_dict(), sys.argv[2] + "/weights.pt")
torch.jit.script(tiny).save(sys.argv[2] + "/script.pt")
"""


def build(folder: Path, stores: tuple) -> Path:
    """Packs the archives of some stores into a folder for each store."""
    folder.mkdir(parents=True)
    weights = folder.parent / f"{folder.name}-weights"
    if "torch" in stores:
        weights.mkdir()
        program = f"import sys; sys.path.append({torch_folder()!r}){WEIGHTS}"
        subprocess.run([sys.executable, "-c", program, str(SOURCES / "tiny"), str(weights)], check=True, timeout=300)
    for store in stores:
        for archive in of(store):
            make(archive, folder, weights)
    return folder
