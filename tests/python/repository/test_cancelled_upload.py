"""A load with files of the client that is cancelled."""

import base64
import json
import threading

import pytest

from harness.waiting import eventually, pause_as_client
from python_backend.worker import PYTHON, has_worker

CODE = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
needs_worker = pytest.mark.skipif(not has_worker, reason=f"{PYTHON} does not have the package pharos-worker: make python-worker")


def sent(code: str) -> bytes:
    """Returns the body of a load of a model with this code."""
    tensors = (("input", "INPUT0"), ("output", "OUTPUT0"))
    config = {kind: [{"name": name, "data_type": "TYPE_FP32", "dims": [2]}] for kind, name in tensors} | {"backend": "python"}
    parameters = {"config": json.dumps(config), "file:1/model.py": base64.b64encode(code.encode()).decode()}
    return json.dumps({"parameters": parameters}).encode()


@needs_worker
def test_the_files_stay_until_the_worker_has_ended(start, tmp_path):
    """The worker is ended at any point of its start, and never looks for files that are gone: the log has no such error."""
    server = start([], "--model-control-mode=explicit", f"--python={PYTHON}", repository=tmp_path)
    answers = []
    for number in range(60):
        loading = threading.Thread(target=lambda: answers.append(server.ask("POST", "/v2/repository/models/sent/load", sent(CODE))))
        loading.start()
        pause_as_client(0.004 + 0.0003 * number)
        assert server.ask("POST", "/v2/repository/models/sent/unload", b"")[0] == 200
        loading.join()
    cancelled = [text for status, text in answers if status == 400 and "it was unloaded during the load" in text]
    assert cancelled, answers
    # The last load may have begun after its unload.
    assert server.ask("POST", "/v2/repository/models/sent/unload", b"")[0] == 200
    eventually("all workers have ended", lambda: not server.workers())
    log = server.log.read_text()
    assert "Traceback" not in log and "not found" not in log, server.log_tail()


@needs_worker
def test_the_exit_cancels_loads(start, tmp_path):
    """The answer is that of other requests at the exit, and not that the server has removed the files."""
    code = f"""import os

open({str(tmp_path / "begun")!r}, "w").close()
while True:
    os.stat(__file__)
"""
    # The code runs in a sandbox.
    options = ["--model-control-mode=explicit", f"--python={PYTHON}", f"--worker-sandbox-write={tmp_path}"]
    server = start([], *options, repository=tmp_path)
    answers = []
    loading = threading.Thread(target=lambda: answers.append(server.ask("POST", "/v2/repository/models/sent/load", sent(code))))
    loading.start()
    eventually("the code runs", (tmp_path / "begun").exists)
    assert server.stop() == 0
    loading.join()
    assert answers[0][0] == 503 and json.loads(answers[0][1]) == {"error": "Server exiting"}, answers
    assert "Traceback" not in server.log.read_text(), server.log_tail()
