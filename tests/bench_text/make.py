"""Makes a model of MiniLM's size with random weights: `make.py FOLDER`. Runs with the packages of tests/text/requirements.txt."""

import json
import random
import sys
from pathlib import Path

import torch
from optimum.exporters.onnx import main_export
from sentence_transformers import SentenceTransformer, models
from transformers import AutoModel, BertConfig, BertTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}


def words() -> list:
    """Returns words of a vocabulary, always the same."""
    source = random.Random(5)
    return sorted({"".join(source.choices(LETTERS, k=source.randint(2, 9))) for _ in range(30_000)})


def lay_out(folder: Path):
    """Writes the files of sentence-transformers as models of the hub have them: all its versions read these."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"} for at, (kind, path) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": SIZE["hidden_size"], "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    written = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
        "1_Pooling/config.json": pooling | {"pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False},
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=2))


def main(folder: Path):
    """Writes the model as sentence-transformers does, and its graph."""
    folder.mkdir(parents=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, *LETTERS, *("##" + letter for letter in LETTERS), *words()]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512)
    torch.manual_seed(3)
    AutoModel.from_config(BertConfig(vocab_size=len(tokenizer), **SIZE)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    modules = [models.Transformer(str(folder), max_seq_length=512), models.Pooling(SIZE["hidden_size"], pooling_mode="mean"), models.Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    main_export(str(folder), output=str(folder), task="feature-extraction", library_name="transformers", no_post_process=True, do_validation=False)
    lay_out(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
