"""Makes a model of MiniLM's size with random weights: `make.py FOLDER`. Runs with the packages of tests/text/requirements.txt."""

import random
import sys
from pathlib import Path

import torch
from optimum.exporters.onnx import main_export
from sentence_transformers import SentenceTransformer, models
from transformers import AutoModel, BertConfig, BertTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words() -> list:
    """Returns words of a vocabulary, always the same."""
    source = random.Random(5)
    return sorted({"".join(source.choices(LETTERS, k=source.randint(2, 9))) for _ in range(30_000)})


def main(folder: Path):
    """Writes the model as sentence-transformers does, and its graph."""
    folder.mkdir(parents=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, *LETTERS, *("##" + letter for letter in LETTERS), *words()]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512)
    torch.manual_seed(3)
    size = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    AutoModel.from_config(BertConfig(vocab_size=len(tokenizer), **size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    modules = [models.Transformer(str(folder), max_seq_length=512), models.Pooling(384, pooling_mode="mean"), models.Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    main_export(str(folder), output=str(folder), task="feature-extraction", library_name="transformers", no_post_process=True, do_validation=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
