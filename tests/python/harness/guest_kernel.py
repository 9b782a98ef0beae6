"""Runs tests in a guest: a second Linux kernel (User-mode Linux) that sees the file system of this machine, and in which tests may use
what the machine's kernel does not give them, such as control groups of version 2 with all controllers.

The kernel is `linux.uml` of the PATH, or of Debian's package `user-mode-linux` unpacked in `~/.cache/pharos-guest-kernel`. `python -m
harness.guest_kernel` downloads it if it is missing; `make test` runs that first. The guest cannot write files of the machine; its
own are in memory, in `/run`. It has one processor, and no network but loopback.

Not every machine can run it: Linux 6.1 cannot save the registers of processors with AMX, for example. `refusal` finds that out by a
guest that runs one command.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

from harness import debian
from harness.server import ROOT, binary

CACHE = debian.cache("pharos-guest-kernel")
MEMORY = "2G"
TRIAL = """#!/bin/sh
mount -t proc proc /proc
exec > /dev/console 2>&1 < /dev/null
/bin/true && echo '{ran}'
echo o > /proc/sysrq-trigger
while :; do sleep 1; done
"""
RAN = "the guest runs programs"
TRIAL_S = 60
INIT = """#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec > /dev/console 2>&1 < /dev/null
export PATH='{path}' HOME=/run TMPDIR=/run LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PHAROS_BIN='{binary}'
{python} -c 'import socket, fcntl, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 73))'
cd {root}/tests/python
{python} -m pytest -p no:cacheprovider --basetemp=/run/tests -q -rA --tb=short --color=no {module}
echo "exit status $?"
sync
echo o > /proc/sysrq-trigger
while :; do sleep 1; done
"""
"""The first process. The number 0x8914 (SIOCSIFFLAGS) with 73 (up, loopback, running) enables the loopback interface."""


def program() -> str | None:
    """Returns the path of the kernel, or None."""
    return debian.program("linux.uml", CACHE)


def unsupported() -> str:
    """Returns why this machine or user cannot start a guest; empty if they can."""
    if platform.machine() != "x86_64":
        return "User-mode Linux needs an x86-64 machine"
    if os.geteuid() != 0:
        return "the guest mounts file systems of the machine with the rights of their owners, which needs root"
    return ""


def missing() -> str:
    """Returns why no guest can be started; empty if one can."""
    absent = "linux.uml is not installed: apt-get install user-mode-linux, or PYTHONPATH=tests/python python -m harness.guest_kernel"
    return unsupported() or ("" if program() else absent)


def fetch() -> str:
    """Unpacks Debian's package in the cache. Returns a message about the result. A failed download is no error."""
    failure = unsupported() or ("" if program() else debian.fetch("user-mode-linux", CACHE))
    return failure or missing() or f"guest kernel: {program()}"


def refusal(folder: Path) -> str:
    """Returns why this machine runs no guest, found by a guest that runs one command; empty if it runs one. `folder` gets files of the
    kernel."""
    try:
        output = boot(TRIAL.format(ran=RAN), folder, TRIAL_S)
    except subprocess.TimeoutExpired:
        return f"a guest that runs one command did not end within {TRIAL_S} s"
    if RAN in output:
        return ""
    # The cause precedes the panic, which a long trace follows.
    lines = [line.strip() for line in output.partition("Kernel panic")[0].split("\n") if line.strip()]
    return f"this machine cannot run User-mode Linux: {lines[-1] if lines else 'it printed nothing'}"


def run(module: Path, folder: Path, limit_s: float) -> str:
    """Runs the tests of a module in a guest with pytest, and returns what the guest has printed. `folder` gets files of the kernel."""
    python = Path(sys.executable)
    path = f"{python.parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return boot(INIT.format(path=path, binary=binary(), python=python, root=ROOT, module=module), folder, limit_s)


def boot(script: str, folder: Path, limit_s: float) -> str:
    """Starts a guest with this script as its first process, and returns what it has printed until it ended. `folder` gets files of the
    kernel."""
    init = folder / "init"
    init.write_text(script)
    init.chmod(0o755)
    command = [program(), f"mem={MEMORY}", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}"]
    command += ["con=null", "con0=null,fd:1", "quiet", f"umid=pharos-{os.getpid()}", f"uml_dir={folder}"]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=limit_s,
        env=os.environ | {"TMPDIR": str(folder)},
        cwd=folder,
    )
    return done.stdout


if __name__ == "__main__":
    print(fetch())
