"""Stands in for the package `pharos-worker`: it is started as that is, says what it was started with, and does what a file
tells it to.

The folder `PHAROS_STANDIN` has for each model a file `MODEL.json` with what is to be done (see `__main__`), and for each
environment perhaps a file `ENVIRONMENT.import` with code that is run when this package is imported.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(os.environ["PHAROS_STANDIN"])
_code = FOLDER / f"{Path(sys.prefix).name}.import"
if _code.exists():
    exec(_code.read_text())
