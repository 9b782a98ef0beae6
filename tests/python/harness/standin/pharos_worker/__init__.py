"""A test double of the package `pharos-worker`: it is started in the same way, records how it was started, and follows the
instructions of a file.

The folder `PHAROS_STANDIN` has a file `MODEL.json` with instructions for each model (see `__main__`), and can have a file
`ENVIRONMENT.import` for each environment with code that runs when this package is imported.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(os.environ["PHAROS_STANDIN"])
_code = FOLDER / f"{Path(sys.prefix).name}.import"
if _code.exists():
    exec(_code.read_text())
