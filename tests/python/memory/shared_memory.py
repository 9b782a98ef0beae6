#!/usr/bin/env python3
"""Runs rows of `shared_memory_tables.py` against this server or a real Triton, and returns the outcomes.

python -m memory.shared_memory record     records the Triton peer's answers in golden_shared_memory.json
"""

import json
import os
import shutil
import socket
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from harness import triton_repository
from harness.peers import Triton
from harness.server import Server
from harness.wire import GrpcCase, send_grpc, send_http
from memory.shared_memory_tables import OBJECT, PREFIX, ROWS, Row, contents, rpc

GOLDEN = Path(__file__).resolve().parent / "golden_shared_memory.json"
SHM = Path("/dev/shm")
CRASHED = "crashed"
MODELS = ["simple", "identity_bytes"]


@contextmanager
def objects():
    """Creates all files that the keys of the table name."""
    clean()
    (SHM / f"{PREFIX}_folder").mkdir()
    (SHM / f"{PREFIX}_folder/inner").write_bytes(contents())
    (SHM / f"{PREFIX}_link").symlink_to(SHM / OBJECT[1:])
    with tempfile.NamedTemporaryFile() as outside, socket.socket(socket.AF_UNIX) as unix:
        outside.write(contents())
        outside.flush()
        (SHM / f"{PREFIX}_out").symlink_to(outside.name)
        (SHM / f"{PREFIX}_broken").symlink_to("/nowhere/at/all")
        os.mkfifo(SHM / f"{PREFIX}_fifo")
        unix.bind(str(SHM / f"{PREFIX}_socket"))
        (SHM / f"{PREFIX}_é").write_bytes(contents())
        (SHM / f"{PREFIX}_empty").write_bytes(b"")
        try:
            yield
        finally:
            clean()


def clean():
    """Removes the files of the table."""
    for path in SHM.glob(f"{PREFIX}_*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def facts(row: Row, http: str, grpc: str) -> dict:
    """Runs a row and returns the outcome."""
    path = SHM / OBJECT[1:]
    path.write_bytes(contents())
    send_grpc(grpc, rpc("Unregister"))
    answers = []
    for case in row.calls:
        answer = send_grpc(grpc, case) if isinstance(case, GrpcCase) else send_http(http, case)
        answers.append([answer.status, answer.text, answer.blob.hex()])
    written = path.read_bytes()[2048:].rstrip(b"\0").hex()
    send_grpc(grpc, rpc("Unregister"))
    return {"answers": answers} | ({"written": written} if written else {})


def run_ours(rows: list, folder: Path, options=()) -> dict:
    """Returns the outcomes of the rows on this server."""
    models = folder / "models"
    for model in MODELS:
        source = next(path for path in triton_repository.COMPARED if path.endswith(f"/{model}"))
        shutil.copytree(triton_repository.ROOT / source, models / model)
    with objects(), Server(folder, [models], options) as server:
        return {row.name: facts(row, server.http, server.grpc) for row in rows}


def run_triton(rows: list, folder: Path) -> dict:
    """Returns the outcomes of the rows on a real Triton, which is restarted after a crash."""
    repository = triton_repository.build(folder / "models")
    for model in repository.iterdir():
        if model.name not in MODELS:
            shutil.rmtree(model)
    triton = Triton(repository, folder / "triton.log")

    def ask(row: Row) -> dict:
        triton.ensure()
        try:
            found = facts(row, triton.http, triton.grpc)
            if triton.is_ready():
                return found
        except OSError:
            pass
        triton.wait_for_end()
        return {"answers": CRASHED}

    try:
        with objects():
            return {row.name: ask(row) for row in rows}
    finally:
        triton.stop()


if __name__ == "__main__":
    if sys.argv[1:] != ["record"]:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        GOLDEN.write_text(json.dumps(run_triton(ROWS, Path(temporary)), indent=1, ensure_ascii=False) + "\n")
    print(f"{len(ROWS)} rows written to {GOLDEN.name}")
