"""Fills the directory of a model for a test of its handler."""

import os
import shutil
import urllib.parse
import urllib.request
from pathlib import Path


def download_model(model_url, model_dir):
    """Copies a file of weights to `model.pt` in a directory. Downloads it once: it is kept in `ts` of the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ts"
    cache.mkdir(parents=True, exist_ok=True)
    kept = cache / Path(urllib.parse.urlparse(model_url).path).name
    if not kept.exists():
        part = kept.with_name(kept.name + ".part")
        with urllib.request.urlopen(model_url) as source, open(part, "wb") as file:
            shutil.copyfileobj(source, file)
        part.replace(kept)
    shutil.copy(kept, Path(model_dir) / "model.pt")


def copy_files(src_dir, dst_dir, files):
    """Copies files: a dictionary of names in `src_dir` to names in `dst_dir`."""
    for source, target in files.items():
        shutil.copyfile(Path(src_dir) / source, Path(dst_dir) / target)
