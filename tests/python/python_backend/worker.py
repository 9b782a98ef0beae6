"""The Python interpreter that runs models, and a function that writes models with the code of `python_models/`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CODE = Path(__file__).resolve().parent / "python_models"
PYTHON = os.environ.get("PHAROS_PYTHON") or sys.executable
has_worker = subprocess.run([PYTHON, "-c", "import pharos_worker"], capture_output=True).returncode == 0


def model(folder, name, code, extra="", tensor="FP32", dims="[ -1 ]"):
    """Writes a model with this code."""
    (folder / name / "1").mkdir(parents=True)
    shutil.copy(CODE / f"{code}.py", folder / name / "1/model.py")
    tensors = "".join(
        f'{side} [ {{ name: "{ending}" data_type: TYPE_{tensor} dims: {dims} {more} }} ]\n'
        for side, ending, more in (("input", "IN", "allow_ragged_batch: true" if "ragged" in name else ""), ("output", "OUT", ""))
    )
    (folder / name / "config.pbtxt").write_text(f'backend: "python"\n{tensors}{extra}')
