"""Finds and unpacks the model archive of a version.

A version's directory contains the files of an archive, a single directory with them, or one `.mar` or `.tar.gz` file. An
archive is unpacked once for all processes of this user, into a directory named by the hash of its content. Users of the
directory hold a shared lock on the file `.lock` beside it, its removal holds an exclusive one, and unpacking holds an
exclusive lock on the file `.making`.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tarfile
import tempfile
import time
import zipfile
import zlib


MANIFEST = os.path.join("MAR-INF", "MANIFEST.json")
ENDINGS = (".mar", ".tar.gz", ".tgz", ".zip")
UNPACKING = (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, RuntimeError, ValueError, zlib.error)
"""The exceptions for archives that cannot be unpacked: damaged, encrypted or compressed in an unknown way."""
UNUSED_S = 3600
"""How long a directory may be unused before the next unpacking removes it."""
MARKER = ".pharos-directory"
"""The file that marks a directory as created by this module; files are only removed in such directories."""
KEY = re.compile("[0-9a-f]{32}")
"""The names of unpacked archives; no other files are ever removed."""


class Refused(Exception):
    """The directory of a version has several archives or an invalid one."""


def find(version):
    """Returns the archive in a version's directory; None if its contents are unpacked already."""
    entries = sorted(os.listdir(version))
    archives = [name for name in entries if name.endswith(ENDINGS) and os.path.isfile(os.path.join(version, name))]
    if os.path.exists(os.path.join(version, MANIFEST)) or not archives:
        return None
    if len(archives) > 1:
        raise Refused(f"{version} contains {len(archives)} archives, {', '.join(archives)}; only one is allowed")
    return os.path.join(version, archives[0])


def unpacked(version):
    """Returns the directory with a model's files, and a lock to hold while they are used (None if not unpacked here)."""
    archive = find(version)
    if archive is None:
        return _inner(version), None
    folder = _folder()
    key = _key(archive)
    lock = _locked(os.path.join(folder, f"{key}.lock"))
    target = os.path.join(folder, key)
    if not os.path.isdir(target):
        with open(f"{target}.making", "a") as making:
            fcntl.flock(making, fcntl.LOCK_EX)
            if not os.path.isdir(target):
                _remove_unused(folder, key)
                _unpack(archive, target)
    os.utime(lock.name)
    return _inner(target), lock


def _inner(directory):
    """Returns the directory that contains the manifest: a `tgz` archive may have a top-level directory."""
    if os.path.exists(os.path.join(directory, MANIFEST)):
        return directory
    inner = [entry.path for entry in os.scandir(directory) if os.path.exists(os.path.join(entry.path, MANIFEST))]
    return inner[0] if len(inner) == 1 else directory


def _folder():
    """Returns the directory for unpacked archives. Others must not be able to write to it, because its files are executed."""
    folder = os.path.join(tempfile.gettempdir(), f"pharos-torchserve-{os.geteuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not os.path.isdir(folder) or os.path.islink(folder) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Refused(f"the directory of unpacked archives '{folder}' is writable by others; remove it, or set TMPDIR")
    if not os.listdir(folder):
        open(os.path.join(folder, MARKER), "a").close()
    return folder


def _key(archive):
    digest = hashlib.blake2b(digest_size=16)
    with open(archive, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def _locked(path):
    """Opens this lock file with a shared lock. Creates it again if it is removed at the same time."""
    while True:
        lock = open(path, "a")  # noqa: SIM115: open as long as the model is used
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            if os.stat(path).st_ino == os.fstat(lock.fileno()).st_ino:
                return lock
        except FileNotFoundError:
            pass
        lock.close()


def _remove_unused(folder, but):
    """Removes directories that are unused for long. Other processes may do the same concurrently."""
    if not os.path.isfile(os.path.join(folder, MARKER)):
        return
    for name in os.listdir(folder):
        key, ending = os.path.splitext(name)
        if ending == ".lock" and key != but and KEY.fullmatch(key):
            with contextlib.suppress(FileNotFoundError):
                _remove_if_unused(folder, key)


def _remove_if_unused(folder, key):
    path = os.path.join(folder, f"{key}.lock")
    # Opened for reading, so that a removed lock file is not created again.
    with open(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        named, held = os.stat(path), os.fstat(lock.fileno())
        if named.st_ino != held.st_ino or time.time() - held.st_mtime < UNUSED_S:
            return
        _remove(os.path.join(folder, key))
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, f"{key}.making"))
        os.remove(path)


def _remove(target):
    """Removes an unpacked archive. Renames it first: if this process is killed, the rest must not look like a complete one."""
    part = f"{target}.part"
    shutil.rmtree(part, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, part)
    shutil.rmtree(part, ignore_errors=True)


def _unpack(archive, target):
    """Unpacks into a temporary directory and renames it when complete."""
    part = f"{target}.part"
    shutil.rmtree(part, ignore_errors=True)
    os.mkdir(part, 0o700)
    try:
        if archive.endswith((".mar", ".zip")):
            with zipfile.ZipFile(archive) as file:
                # extractall() removes ".." and roots from names, and creates no links.
                file.extractall(part)
        else:
            with tarfile.open(archive) as file:
                _extract(file, part)
    except UNPACKING as error:
        shutil.rmtree(part, ignore_errors=True)
        raise Refused(f"cannot unpack '{archive}': {error}") from None
    os.rename(part, target)


def _extract(file, target):
    if hasattr(tarfile, "data_filter"):
        file.extractall(target, filter="data")
        return
    root = os.path.realpath(target)
    for member in file.getmembers():
        inside = os.path.realpath(os.path.join(root, member.name))
        if not (member.isfile() or member.isdir()) or not f"{inside}/".startswith(f"{root}/"):
            raise tarfile.TarError(f"'{member.name}' is not a file inside the archive")
        file.extract(member, target)
