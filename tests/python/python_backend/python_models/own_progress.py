"""A model that reports a quarter of its load, waits for the file `go_on` beside it, and reports wrongly when it executes."""

import time
from pathlib import Path

import pharos_worker
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        try:
            pharos_worker.report_load_progress(1.5)
        except ValueError as error:
            print(error)
        pharos_worker.report_load_progress(0.25)
        while not (Path(pb_utils.get_model_dir()) / "go_on").exists():
            time.sleep(0.01)

    def execute(self, requests):
        pharos_worker.report_load_progress(0.5)
