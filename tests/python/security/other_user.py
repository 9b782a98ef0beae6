"""Servers whose workers run as another user (`--worker-user`)."""

import os
import sys
from pathlib import Path

from faults.isolated import Isolated, missing
from harness.server import binary

WHY_NOT = missing("mount", "mount", "setpriv") if os.geteuid() == 0 else "starting processes of another user needs root"
"""Why no such server can be started; empty if one can."""

USER, GROUP = 64123, 64124
"""Numbers without names."""
FLAG = f"--worker-user={USER}:{GROUP}"


def is_closed(directory: Path) -> bool:
    """Returns whether other users cannot pass through a directory."""
    return not directory.stat().st_mode & 0o001


def reachable(folder: Path) -> tuple:
    """Lets every user reach the programs and the Python of the tests, which can be in directories of root. Returns the shell
    commands that do it in a separate mount namespace, and the variables of a server there. `folder` is for its files; it must be open
    to every user (the fixture `open_path`)."""
    assert not [above for above in (folder, *folder.parents) if is_closed(above)]
    kept, temporary = folder / "kept", folder / "tmp"
    kept.mkdir()
    temporary.mkdir()
    temporary.chmod(0o1777)
    needed = {binary().parent, Path(sys.prefix), Path(sys.base_prefix)}
    hidden = {path: [above for above in path.parents if is_closed(above)] for path in needed}
    hidden = {path: above[-1] for path, above in hidden.items() if above and not needed & set(path.parents)}
    # An empty directory takes the place of the closed one, with only what is needed in it.
    before = [f"mkdir -p {kept}/{number}; mount --bind {path} {kept}/{number}" for number, path in enumerate(hidden)]
    instead = [f"mount -t tmpfs -o mode=755 none {above}" for above in set(hidden.values())]
    after = [f"mkdir -p {path}; mount --move {kept}/{number} {path}" for number, path in enumerate(hidden)]
    return "\n".join([*before, *instead, *after]), {"TMPDIR": str(temporary)}


def started(tmp_path: Path, repositories, *options, through=(), kind=Isolated) -> Isolated:
    """Returns a server of the class `kind` whose files are only for its user (umask 077). The command `through` starts it."""
    mounts, environment = reachable(tmp_path)
    server = kind("mount", f"{mounts}\numask 077", tmp_path, repositories, [FLAG, *options])
    at = server.command.index(str(binary()))
    server.command[at:at] = through
    server.environment = environment | {"XDG_CACHE_HOME": str(tmp_path), "HF_HOME": "/data"}
    return server


def identity(pid: int) -> tuple:
    """Returns the user, the groups and the capabilities of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.split() for name, value in (line.split(":", 1) for line in lines)}
    assert len(set(status["Uid"])) == len(set(status["Gid"])) == 1, status
    capabilities = {status[f"Cap{kind}"][0] for kind in ("Inh", "Prm", "Eff", "Amb")}
    return int(status["Uid"][0]), int(status["Gid"][0]), [int(group) for group in status["Groups"]], capabilities
