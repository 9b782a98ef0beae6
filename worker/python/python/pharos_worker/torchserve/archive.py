"""Archives of models: where a version's files are, once they are unpacked.

A version's directory holds what an archive holds, a single directory that does, or one `.mar` or `.tar.gz`. An archive is
unpacked once for all processes of this user, into a directory named by its content. Beside it a file `.lock` is held shared by
who uses it and exclusively by who removes it, and a file `.making` is held exclusively by who unpacks it.
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


MANIFEST = os.path.join("MAR-INF", "MANIFEST.json")
ENDINGS = (".mar", ".tar.gz", ".tgz", ".zip")
UNUSED_S = 3600
"""What nobody uses for so long is removed when something else is unpacked."""
MARKER = ".pharos-directory"
"""Marks a directory that was made here; nothing is removed in one without it."""
KEY = re.compile("[0-9a-f]{32}")
"""Names of what is unpacked; nothing else is ever removed."""


class Refused(Exception):
    """A version's directory has no archive, or one that cannot be used."""


def find(version):
    """The archive in a version's directory; None if what it holds is unpacked."""
    entries = sorted(os.listdir(version))
    archives = [name for name in entries if name.endswith(ENDINGS) and os.path.isfile(os.path.join(version, name))]
    if os.path.exists(os.path.join(version, MANIFEST)) or not archives:
        return None
    if len(archives) > 1:
        raise Refused(f"{version} holds {len(archives)} archives, {', '.join(archives)}; one is allowed")
    return os.path.join(version, archives[0])


def unpacked(version):
    """The directory with a model's files, and what is to be kept open while it is used."""
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
    """An archive of the kind `tgz` has everything in a directory of the model's name."""
    if os.path.exists(os.path.join(directory, MANIFEST)):
        return directory
    inner = [entry.path for entry in os.scandir(directory) if os.path.exists(os.path.join(entry.path, MANIFEST))]
    return inner[0] if len(inner) == 1 else directory


def _folder():
    """Where archives are unpacked: a directory that nobody else can write to, since what is in it is executed."""
    folder = os.path.join(tempfile.gettempdir(), f"pharos-torchserve-{os.geteuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not os.path.isdir(folder) or os.path.islink(folder) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Refused(f"'{folder}', where archives are unpacked, can be written to by others: remove it, or set TMPDIR")
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
    """The open lock file of this path, held shared. One that was removed meanwhile is made anew."""
    while True:
        lock = open(path, "a")  # noqa: SIM115: it stays open as long as the model is used
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            if os.stat(path).st_ino == os.fstat(lock.fileno()).st_ino:
                return lock
        except FileNotFoundError:
            pass
        lock.close()


def _remove_unused(folder, but):
    """Removes what nobody has used for long. Other processes do the same at any moment: anything may be gone already."""
    if not os.path.isfile(os.path.join(folder, MARKER)):
        return
    for name in os.listdir(folder):
        key, ending = os.path.splitext(name)
        if ending == ".lock" and key != but and KEY.fullmatch(key):
            with contextlib.suppress(FileNotFoundError):
                _remove_if_unused(folder, key)


def _remove_if_unused(folder, key):
    path = os.path.join(folder, f"{key}.lock")
    # Not made anew if it is gone.
    with open(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        named, held = os.stat(path), os.fstat(lock.fileno())
        if named.st_ino != held.st_ino or time.time() - held.st_mtime < UNUSED_S:
            return
        shutil.rmtree(os.path.join(folder, key), ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, f"{key}.making"))
        os.remove(path)


def _unpack(archive, target):
    """Unpacks into a directory that has its name only when all is there."""
    part = f"{target}.part"
    shutil.rmtree(part, ignore_errors=True)
    os.mkdir(part, 0o700)
    try:
        if archive.endswith((".mar", ".zip")):
            with zipfile.ZipFile(archive) as file:
                # It takes ".." and roots off names, and makes no links.
                file.extractall(part)
        else:
            with tarfile.open(archive) as file:
                _extract(file, part)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise Refused(f"'{archive}' cannot be unpacked: {error}") from None
    os.rename(part, target)


def _extract(file, target):
    if hasattr(tarfile, "data_filter"):
        file.extractall(target, filter="data")
        return
    for member in file.getmembers():
        inside = os.path.realpath(os.path.join(target, member.name))
        if not (member.isfile() or member.isdir()) or not inside.startswith(os.path.realpath(target) + os.sep):
            raise tarfile.TarError(f"'{member.name}' is no file inside of the archive")
        file.extract(member, target)
