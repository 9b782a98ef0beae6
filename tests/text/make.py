"""Makes small models of transformers with random weights, exports them to ONNX, and writes what transformers and
sentence-transformers compute with them.

    python tests/text/make.py FOLDER

FOLDER gets a directory for each model, as Hugging Face lays it out, and `expected.json`: for each model, its texts and results.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer, models
from tokenizers import ByteLevelBPETokenizer, SentencePieceUnigramTokenizer
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertTokenizerFast,
    DebertaV2Config,
    MPNetConfig,
    MPNetTokenizerFast,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaTokenizerFast,
    XLMRobertaConfig,
    pipeline,
)

TEXTS = [
    "The parcel has not arrived.",
    "Berlin is the capital of Germany, and Anna Smith lives there.",
    "a",
    "",
    "Größe, Straße, Äpfel: naïve café — “quoted”…",
    "Привет мир, こんにちは世界, 你好，世界, שלום עולם, नमस्ते",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 and\ttabs\nlines\u00a0spaces\u200b",
    "word " * 60,
]
PAIRS = [(first, second) for first in TEXTS[:3] for second in TEXTS[4:7]]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SMALL |= {"initializer_range": 0.5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def corpus() -> list:
    """Returns texts to train tokenizers with."""
    return TEXTS * 4


def bert(folder: Path):
    """Returns a tokenizer of BERT and its configuration."""
    words = sorted({word for text in TEXTS for word in text.lower().split() if word.isprintable()})
    letters = sorted({letter for word in words for letter in word if letter.isprintable()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters), *words]
    path = folder / "vocab.txt"
    path.write_text("\n".join(dict.fromkeys(vocabulary)))
    tokenizer = BertTokenizerFast(str(path), model_max_length=64)
    return tokenizer, BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **SMALL)


def mpnet(folder: Path):
    """Returns a tokenizer of MPNet and its configuration."""
    bert(folder)
    words = (folder / "vocab.txt").read_text().split("\n")
    special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    path = folder / "mpnet.txt"
    path.write_text("\n".join([*special, *(word for word in words if word not in special and not word.startswith("["))]))
    tokenizer = MPNetTokenizerFast(str(path), model_max_length=64)
    return tokenizer, MPNetConfig(vocab_size=len(tokenizer), max_position_embeddings=66, pad_token_id=1, **SMALL)


def roberta(folder: Path):
    """Returns a tokenizer of RoBERTa and its configuration."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(corpus(), vocab_size=400, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], show_progress=False)
    trained.save_model(str(folder))
    tokenizer = RobertaTokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=64)
    return tokenizer, RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=66, pad_token_id=1, **SMALL)


def unigram(special: list, template: tuple, **names) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of SentencePiece's kind."""
    from tokenizers.processors import TemplateProcessing

    trained = SentencePieceUnigramTokenizer()
    trained.train_from_iterator(corpus(), vocab_size=220, special_tokens=special, unk_token="<unk>" if "<unk>" in special else "[UNK]", show_progress=False)
    single, pair = template
    used = [(token, special.index(token)) for token in special if f"{token} " in pair + " "]
    trained._tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, model_max_length=64, **names)


def xlm_roberta(_: Path):
    """Returns a tokenizer of XLM-RoBERTa and its configuration."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    template = ("<s> $A </s>", "<s> $A </s> </s> $B </s>")
    tokenizer = unigram(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], template, **names)
    return tokenizer, XLMRobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=66, pad_token_id=1, **SMALL)


def deberta(_: Path):
    """Returns a tokenizer of DeBERTa and its configuration."""
    names = {"bos_token": "[CLS]", "eos_token": "[SEP]", "sep_token": "[SEP]", "cls_token": "[CLS]", "unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    template = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    tokenizer = unigram(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"], template, **names)
    relative = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 32, "position_buckets": 16}
    return tokenizer, DebertaV2Config(vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=0, **SMALL, **relative)


FAMILIES = {"bert": bert, "roberta": roberta, "xlm_roberta": xlm_roberta, "mpnet": mpnet, "deberta": deberta}


def export(folder: Path, task: str):
    """Writes the graph of a model into its directory."""
    from optimum.exporters.onnx import main_export

    main_export(str(folder), output=str(folder), task=task, library_name="transformers", no_post_process=True, do_validation=False)
    for leftover in ("model.safetensors", "pytorch_model.bin"):
        (folder / leftover).unlink(missing_ok=True)


def made(folder: Path, name: str, family: str, kind, **more):
    """Writes a model with random weights; returns its directory and its tokenizer."""
    place = folder / name
    work = folder / f".{name}"
    place.mkdir(parents=True)
    work.mkdir()
    torch.manual_seed(7)
    tokenizer, config = FAMILIES[family](work)
    config.update(more)
    kind.from_config(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place, tokenizer


def main(folder: Path):
    """Makes all models."""
    expected = {}
    for family in FAMILIES:
        place, _ = made(folder, f"{family}_embed", family, AutoModel)
        ways = {"bert": "mean", "roberta": "cls", "xlm_roberta": "mean", "mpnet": "max", "deberta": "mean_sqrt_len_tokens"}
        modules = [models.Transformer(str(place), max_seq_length=48), models.Pooling(16, pooling_mode=ways[family])]
        sentences = SentenceTransformer(modules=modules + [models.Normalize()] * (family != "roberta"), device="cpu")
        vectors = sentences.encode(TEXTS)
        prompts = {"query": "query: "}
        queries = sentences.encode(TEXTS[:2], prompt="query: ")
        whole = folder / f".{family}_whole"
        sentences.prompts = prompts
        sentences.save(str(whole))
        for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json", "tokenizer_config.json"):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes((whole / name).read_bytes())
        export(place, "feature-extraction")
        expected[place.name] = {"texts": TEXTS, "vectors": vectors.tolist(), "queries": queries.tolist()}

        place, _ = made(folder, f"{family}_score", family, AutoModelForSequenceClassification, num_labels=1)
        scores = CrossEncoder(str(place), device="cpu", max_length=64).predict(PAIRS)
        export(place, "text-classification")
        expected[place.name] = {"pairs": PAIRS, "scores": scores.tolist()}

        labels = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
        place, tokenizer = made(folder, f"{family}_classify", family, AutoModelForSequenceClassification, id2label=labels, num_labels=5)
        classifier = pipeline("text-classification", str(place), top_k=None, device="cpu")
        results = classifier(TEXTS, truncation=True)
        export(place, "text-classification")
        expected[place.name] = {"texts": TEXTS, "classes": [{one["label"]: one["score"] for one in result} for result in results]}

        place, tokenizer = made(folder, f"{family}_tokens", family, AutoModelForTokenClassification, id2label=labels, num_labels=5)
        finder = pipeline("token-classification", str(place), aggregation_strategy="simple", device="cpu")
        texts = [text for text in TEXTS[:7] if text]
        results = [[span | {"score": float(span["score"])} for span in finder(text)] for text in texts]
        export(place, "token-classification")
        expected[place.name] = {"texts": texts, "spans": results}

        place, tokenizer = made(folder, f"{family}_mask", family, AutoModelForMaskedLM)
        filler = pipeline("fill-mask", str(place), device="cpu")
        texts = [f"The {tokenizer.mask_token} has not arrived.", f"{tokenizer.mask_token} is a {tokenizer.mask_token}"]
        results = [filler(text) for text in texts]
        export(place, "fill-mask")
        expected[place.name] = {"texts": texts, "predictions": results}
    (folder / "expected.json").write_text(json.dumps(expected))
    for work in folder.glob(".*"):
        shutil.rmtree(work)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
