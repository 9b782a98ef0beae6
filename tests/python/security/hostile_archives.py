"""Archives of TorchServe that must be refused: names that lead out of the archive, links, devices, bombs, invalid manifests."""

import gzip
import io
import tarfile
import zipfile

from torchserve.archive_files import zipped
from torchserve.models import contents


def archive(manifest=None, **files) -> bytes:
    """Returns a valid archive of the model `evil`, with changes of its manifest and further files."""
    model = {"modelName": "evil", "modelVersion": "1.0", "handler": "shown"} | (manifest or {})
    return zipped(contents("shown", manifest={"model": model}, files=files))


OUTSIDE, LINK = "is outside the archive", "is a link or a device; only files and directories are allowed"
NAMES = ["../evil", "../../evil", "a/../../evil", "./../evil", "/evil", "//evil", "..\\evil", "C:\\evil", "..", "x/..", "MAR-INF/../../evil"]
"""Names of members that lead out of the archive."""


def tarred(*members: tarfile.TarInfo) -> bytes:
    """Returns a `.tar.gz` of a valid archive and empty members, in the order of a real one."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as made:
        for name, content in contents("shown").items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
        for member in members:
            made.addfile(member)
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    """Returns the header of a member; `target` is that of a link."""
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, target, size
    return made


def zip_with_mode(mode: int) -> bytes:
    """Returns a zip file whose member `l` has this mode and leads to `/etc`."""
    out = io.BytesIO(archive())
    with zipfile.ZipFile(out, "a") as made:
        info = zipfile.ZipInfo("l")
        info.external_attr = mode << 16
        made.writestr(info, "/etc")
    return out.getvalue()


def zip_of_declared_size() -> bytes:
    """Returns a zip file with a member that declares 2 GiB."""
    size = 1_234_567
    return archive(zeros=bytes(size)).replace(size.to_bytes(4, "little"), (2**31 - 1).to_bytes(4, "little"))


def tar_of_directories() -> bytes:
    """Returns a `.tar.gz` with 100,001 directories of the same name."""
    return gzip.compress(member("d/", tarfile.DIRTYPE).tobuf() * 100_001 + bytes(1024), 1)


ARCHIVES = {
    **{f"zip {name}": ("a.mar", lambda name=name: archive(**{name: b"x"}), OUTSIDE) for name in NAMES},
    **{f"tar {name}": ("a.tar.gz", lambda name=name: tarred(member(name)), OUTSIDE) for name in NAMES},
    "directory": ("a.tar.gz", lambda: tarred(member("../evil/", tarfile.DIRTYPE)), OUTSIDE),
    "symbolic link": ("a.tar.gz", lambda: tarred(member("l", tarfile.SYMTYPE, "/etc"), member("l/evil")), LINK),
    "symbolic link inside": ("a.tar.gz", lambda: tarred(member("l", tarfile.SYMTYPE, "shown.py")), LINK),
    "symbolic link in a zip": ("a.mar", lambda: zip_with_mode(0o120777), LINK),
    "hard link": ("a.tar.gz", lambda: tarred(member("l", tarfile.LNKTYPE, "/etc/passwd")), LINK),
    "character device": ("a.tar.gz", lambda: tarred(member("l", tarfile.CHRTYPE)), LINK),
    "block device": ("a.tar.gz", lambda: tarred(member("l", tarfile.BLKTYPE)), LINK),
    "block device in a zip": ("a.mar", lambda: zip_with_mode(0o060666), LINK),
    "pipe": ("a.tar.gz", lambda: tarred(member("l", tarfile.FIFOTYPE)), LINK),
    "same name twice": ("a.tar.gz", lambda: tarred(member("a"), member("a")), "contains 'a' twice"),
    "declared size": ("a.mar", zip_of_declared_size, "the unpacked size exceeds 1073741824 bytes"),
    "declared size of a tar": ("a.tar.gz", lambda: tarred(member("zeros", size=2**40)), "the unpacked size exceeds 1073741824 bytes"),
    "entries": ("a.tar.gz", tar_of_directories, "more than 100000 files and directories"),
    "cut": ("a.mar", lambda: archive()[:-30], "broken zip file"),
    "cut tar": ("a.tar.gz", lambda: tarred()[:-200], "cannot"),
    "configuration outside": ("a.mar", lambda: archive({"configFile": "../../../etc/passwd"}), OUTSIDE),
    "absolute configuration": ("a.mar", lambda: archive({"configFile": "/etc/passwd"}), OUTSIDE),
    "name": ("a.mar", lambda: archive({"modelName": "../evil"}), "must not contain path traversal characters"),
    "absolute name": ("a.mar", lambda: archive({"modelName": "/tmp/evil"}), "must not contain path traversal characters"),
    "name with NUL": ("a.mar", lambda: archive({"modelName": "a\0b"}), "without control characters"),
    "manifest of deep JSON": ("a.mar", lambda: zipped({"MAR-INF/MANIFEST.json": "[" * 10**6}), "invalid manifest"),
}
"""Archives that are refused: name, content, and the text of the answer. `archive/tests.rs` unpacks bombs of the full size."""
