"""Files that `EXECUTION_ENV_PATH` names and that are no archives: their content is not shown, and they hold up no other load."""

import gzip
import json
import os
import threading

import pytest

from harness.server import Server
from harness.waiting import eventually, join_all
from security.hostile import attack, write_model
from security.sandbox_support import named

SECRET = "TOP-SECRET-4711"
OPTIONS = ["--exit-on-error=false", "--strict-readiness=false"]


def test_errors_do_not_show_the_content_of_files(tmp_path):
    text = (f"root:{SECRET}\n" * 100).encode()
    header = bytearray(text)
    header[257:262] = b"ustar"
    contents = {
        "text": text,
        "short": SECRET.encode(),
        "compressed": gzip.compress(text),
        "header": bytes(header),
        "compressed header": gzip.compress(bytes(header)),
        "cut": gzip.compress(text)[:-20],
        "broken": gzip.compress(b"")[:10] + text,
    }
    for number, content in enumerate(contents.values()):
        (tmp_path / f"file{number}").write_bytes(content)
        write_model(tmp_path / "models", f"m{number}")
        named(tmp_path / f"models/m{number}/config.pbtxt", tmp_path / f"file{number}")
    options = [*OPTIONS, f"--environment-cache-directory={tmp_path / 'cache'}"]
    with Server(tmp_path, [tmp_path / "models"], options) as server:
        index, log = server.index(), server.log.read_text()
        for number, case in enumerate(contents):
            reason = index[f"m{number}"][0]["reason"]
            assert "cannot be used: it cannot be unpacked into" in reason and SECRET not in reason, (case, reason)
        assert SECRET not in log and "root:" not in log


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read /proc/kmsg")
def test_a_file_that_is_never_read_to_its_end_holds_up_no_other_load(tmp_path):
    """Reading `/proc/kmsg` blocks until the kernel logs something."""
    write_model(tmp_path / "models", "innocent")
    for number in range(4):
        write_model(tmp_path / "models", f"m{number}")
        named(tmp_path / f"models/m{number}/config.pbtxt", "/proc/kmsg")
    options = [*OPTIONS, "--model-control-mode=explicit", "--model-load-thread-count=2"]
    with Server(tmp_path, [tmp_path / "models"], options) as server:
        answers = []
        load = lambda name: answers.append((name, *server.ask("POST", f"/v2/repository/models/{name}/load", b"")))  # noqa: E731
        threads = [threading.Thread(target=load, args=[f"m{number}"], daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        threads.append(threading.Thread(target=load, args=["innocent"], daemon=True))
        threads[-1].start()
        eventually("the innocent model is loaded", lambda: ("innocent", 200, "") in answers)
        join_all(threads)
        refused = {name: json.loads(answer)["error"] for name, status, answer in answers if status != 200}
        assert set(refused) == {f"m{number}" for number in range(4)}
        assert all("cannot be used: it is empty" in error for error in refused.values()), refused
        assert attack(server, "threads", model="innocent") == "done"
