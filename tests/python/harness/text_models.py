"""Small text models in Hugging Face's layout: tokenizers of every kind, and graphs whose results numpy computes too.

A graph adds a vector for each token, one for its type and the mean of the text's tokens, so that a result depends on all tokens of
its text, and on padding if the mask is not used.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from harness.onnx_file import constant, external_constant, model, node
from harness.server import binary

PROGRAM = binary().parent / "backends/text/pharos-worker-text"
needs_text = pytest.mark.skipif(not PROGRAM.is_file(), reason=f"{PROGRAM} is not built: `make text` builds it")
WIDTH = 16
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SENTENCES = [
    "The parcel has not arrived, and no one answers the telephone.",
    "Berlin is the capital of Germany; Paris is the capital of France.",
    "An app that shows an error after each update is not useful.",
    "Ein Text über Größe, Straße und Äpfel.",
    "Привет мир, こんにちは世界, 你好，世界 and שלום עולם",
]


def word_piece() -> Tokenizer:
    """Returns a tokenizer as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(SENTENCES, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False))
    pair = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    special = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(**pair, special_tokens=special)
    tokenizer.decoder = decoders.WordPiece()
    # As the files of many models have it; the server decides by itself.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=12)
    return tokenizer


def byte_pairs() -> Tokenizer:
    """Returns a tokenizer as RoBERTa has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def unigram() -> Tokenizer:
    """Returns a tokenizer as XLM-RoBERTa has it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


class Weights:
    """The numbers of a graph."""

    def __init__(self, tokens: int, classes: int = 0):
        random = np.random.default_rng(tokens)
        self.tokens = random.normal(size=(tokens, WIDTH)).astype(np.float32)
        self.types = random.normal(size=(2, WIDTH)).astype(np.float32)
        # Small ones: no class is nearly certain, so that each difference of logits is one of probabilities.
        self.classes = random.normal(scale=0.2, size=(WIDTH, classes)).astype(np.float32)

    def hidden(self, ids: list, types: list) -> np.ndarray:
        """Returns the vectors of a text's tokens."""
        own = self.tokens[ids] + self.types[types]
        return own + own.mean(axis=0)


def graph(weights: Weights, head: str = "", more_inputs=(), weights_file: str = "") -> bytes:
    """Returns the graph. `head`: `tokens` has logits of each token, `text` those of the first token; without it, the output is
    `last_hidden_state`. `more_inputs`: names of inputs that it does not use. `weights_file`: the file with the vectors of all tokens,
    beside the graph."""
    nodes = [
        node("Gather", ["tokens", "input_ids"], ["own"]),
        node("Gather", ["types", "token_type_ids"], ["type"]),
        node("Add", ["own", "type"], ["sum"]),
        node("Cast", ["attention_mask"], ["flat"], to=1),
        node("Unsqueeze", ["flat", "last"], ["mask"]),
        node("Mul", ["sum", "mask"], ["masked"]),
        node("ReduceSum", ["masked", "middle"], ["total"], keepdims=1),
        node("ReduceSum", ["mask", "middle"], ["count"], keepdims=1),
        node("Div", ["total", "count"], ["mean"]),
        node("Add", ["sum", "mean"], ["last_hidden_state"]),
    ]
    tokens = constant("tokens", "FP32", weights.tokens)
    if weights_file:
        tokens = external_constant("tokens", "FP32", weights.tokens, weights_file)
    constants = [
        tokens, constant("types", "FP32", weights.types),
        constant("last", "INT64", np.array([2])), constant("middle", "INT64", np.array([1])),
    ]  # fmt: skip
    outputs = [("last_hidden_state", "FP32", ["rows", "length", WIDTH])]
    if head:
        constants.append(constant("classes", "FP32", weights.classes))
        count = weights.classes.shape[1]
        if head == "tokens":
            nodes.append(node("MatMul", ["last_hidden_state", "classes"], ["logits"]))
            outputs = [("logits", "FP32", ["rows", "length", count])]
        else:
            constants.append(constant("zero", "INT64", np.array(0)))
            nodes += [node("Gather", ["last_hidden_state", "zero"], ["first"], axis=1), node("MatMul", ["first", "classes"], ["logits"])]
            outputs = [("logits", "FP32", ["rows", count])]
    inputs = [(name, "INT64", ["rows", "length"]) for name in ("input_ids", "attention_mask", "token_type_ids", *more_inputs)]
    return model(nodes, inputs, outputs, constants)


class TextModel:
    """A model in a folder, and what it computes."""

    def __init__(self, folder: Path, architecture: str = "BertModel", labels=(), head: str = "", tokenizer=None, **config):
        self.folder, self.tokenizer = folder, tokenizer or word_piece()
        folder.mkdir(parents=True, exist_ok=True)
        size = self.tokenizer.get_vocab_size()
        self.weights = Weights(size, size if architecture.endswith("ForMaskedLM") else len(labels))
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        settings = {"architectures": [architecture], "model_type": "bert", "max_position_embeddings": 64, "hidden_size": WIDTH}
        if labels:
            settings["id2label"] = {str(number): label for number, label in enumerate(labels)}
        self.write("config.json", settings | config)
        self.write("tokenizer_config.json", {"model_max_length": 64, "mask_token": "[MASK]"})
        (folder / "model.onnx").write_bytes(graph(self.weights, head))

    def write(self, name: str, value):
        """Writes a file as JSON."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))

    def sentence_transformer(self, normalize: bool = True, **pooling):
        """Makes it a model of sentence-transformers; by default, its pooling is the mean."""
        modules = ["Transformer", "Pooling"] + (["Normalize"] if normalize else [])
        paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        self.write("modules.json", [
            {"idx": at, "name": str(at), "path": paths[name], "type": f"sentence_transformers.models.{name}"} for at, name in enumerate(modules)
        ])  # fmt: skip
        self.write("1_Pooling/config.json", {"word_embedding_dimension": WIDTH} | (pooling or {"pooling_mode_mean_tokens": True}))
        return self

    def hidden(self, text: str, pair=None) -> np.ndarray:
        """Returns the vectors of a text's tokens."""
        encoding = self.tokenizer.encode(text, pair)
        return self.weights.hidden(encoding.ids, encoding.type_ids)

    def embedding(self, text: str, normalize: bool = True) -> np.ndarray:
        """Returns the mean of the vectors of a text's tokens."""
        vector = self.hidden(text).mean(axis=0)
        return vector / np.linalg.norm(vector) if normalize else vector

    def logits(self, text: str, pair=None) -> np.ndarray:
        """Returns the logits of the first token."""
        return self.hidden(text, pair)[0] @ self.weights.classes

    def token_logits(self, text: str) -> np.ndarray:
        """Returns the logits of each token."""
        return self.hidden(text) @ self.weights.classes


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns probabilities, over the last dimension."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def sigmoid(logits):
    """Returns the probability of each class by itself."""
    return 1 / (1 + np.exp(-logits))
