"""Records the vectors that sentence-transformers makes with all-MiniLM-L6-v2, for `test_minilm.py`.

    python tests/text/record_minilm.py FOLDER

FOLDER is the directory of the model, which `python -m backends.minilm` fetches. Runs with the packages of `requirements.txt`.
"""

import base64
import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

GOLDEN = Path(__file__).parents[1] / "python/backends/golden_minilm.json"
TEXTS = [
    "The parcel has not arrived, and no one answers the telephone.",
    "My package is late and support does not pick up.",
    "Berlin is the capital of Germany, and Anna Smith lives there.",
    "a",
    "",
    "¿?",
    "The quick brown fox jumps over the lazy dog",
    "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG!!!",
    "Größe, Straße, Äpfel: naïve café — “quoted”…",
    "Привет мир, こんにちは世界, 你好，世界, שלום עולם, नमस्ते",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 and\ttabs\nlines\u00a0spaces\u200b",
    "def main():\n    return {'key': [1, 2.5e-3], 'other': None}",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "In 1969, Apollo 11 landed on the Moon; its crew came back to Earth after eight days, three hours and eighteen minutes.",
    "A text of some sentences. It says little. " * 10,
    "A text of more tokens than the model takes, whose end is cut off, says the same words again. " * 40,
]


def main(folder: Path):
    """Writes the texts and their vectors, whose floats are encoded in base64."""
    vectors = SentenceTransformer(str(folder), device="cpu").encode(TEXTS).astype(np.float32)
    found = {
        "versions": {package: version(package) for package in ("sentence-transformers", "transformers", "torch")},
        "texts": TEXTS,
        "vectors": [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors],
    }
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
