#!/usr/bin/env python3
"""Makes the tokenizer and the ONNX model of this example, from the sentences below. Needs numpy and tokenizers.

    python3 examples/text/make_models.py [--into FOLDER]

The model sorts requests to a help desk by subject. It is small enough to be trained in a second: the score of a text is the mean of
its tokens' scores. A tokenizer of a published model (`tokenizer.json`) and its exported ONNX file take the same places.
"""

import argparse
import itertools
import shutil
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests/python"))
from harness.onnx_file import constant, model, node  # noqa: E402

BEGINNINGS = ("Hello,", "Good morning,", "Please help:", "Hi there,", "Urgent!", "")
SENTENCES = {
    "billing": (
        "I was charged twice for my order", "my invoice has the wrong amount", "please refund the payment to my credit card",
        "why is the price on my bill higher than in the shop", "the discount is missing on my receipt",
    ),
    "delivery": (
        "my parcel has not arrived", "the package was left at the wrong address", "where is my shipment now",
        "the courier never came", "please send the parcel to another address", "the delivery is late",
    ),
    "technical": (
        "the app crashes when I open it", "I cannot log in with my password", "the page shows an error message",
        "the update does not install", "the screen stays black after the start", "my account is locked",
    ),
}  # fmt: skip
"""The subjects, with sentences about each."""
SUBJECTS = list(SENTENCES)
PADDING, UNKNOWN = "[PAD]", "[UNK]"
STEPS, RATE = 400, 20.0


def examples() -> tuple:
    """Returns the texts and the indices of their subjects."""
    pairs = [
        (f"{beginning} {sentence}".strip(), subject)
        for subject, sentences in enumerate(SENTENCES.values())
        for beginning, sentence in itertools.product(BEGINNINGS, sentences)
    ]
    texts, subjects = zip(*pairs)
    return list(texts), np.array(subjects)


def train_tokenizer(texts: list) -> Tokenizer:
    """Returns a WordPiece tokenizer, as BERT has it, for these texts. The token 0 is the padding."""
    tokenizer = Tokenizer(WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    trainer = WordPieceTrainer(vocab_size=400, special_tokens=[PADDING, UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def softmax(scores: np.ndarray) -> np.ndarray:
    """Returns the probabilities of rows of scores."""
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def train_scores(tokenizer: Tokenizer, texts: list, subjects: np.ndarray) -> np.ndarray:
    """Returns the scores FP32 [tokens, subjects], by gradient descent."""
    shares = np.zeros((len(texts), tokenizer.get_vocab_size()))
    for row, encoding in zip(shares, tokenizer.encode_batch(texts)):
        np.add.at(row, encoding.ids, 1 / len(encoding.ids))
    wanted = np.eye(len(SUBJECTS))[subjects]
    scores = np.zeros((shares.shape[1], len(SUBJECTS)))
    for _ in range(STEPS):
        scores -= RATE * shares.T @ (softmax(shares @ scores) - wanted) / len(texts)
    return scores.astype(np.float32)


def encoder(scores: np.ndarray) -> bytes:
    """`input_ids` and `attention_mask`, INT64 [batch, length] -> `probabilities` FP32 [batch, subjects]."""
    nodes = [
        node("Gather", ["scores", "input_ids"], ["of_tokens"], axis=0),
        node("Cast", ["attention_mask"], ["mask"], to=1),
        node("Unsqueeze", ["mask", "last"], ["column"]),
        node("Mul", ["of_tokens", "column"], ["kept"]),
        node("ReduceSum", ["kept", "tokens"], ["sum"], keepdims=0),
        node("ReduceSum", ["mask", "tokens"], ["count"], keepdims=1),
        node("Max", ["count", "one"], ["at_least_one"]),
        node("Div", ["sum", "at_least_one"], ["mean"]),
        node("Softmax", ["mean"], ["probabilities"], axis=1),
    ]
    constants = [
        constant("scores", "FP32", scores),
        constant("last", "INT64", np.array([2])),
        constant("tokens", "INT64", np.array([1])),
        constant("one", "FP32", np.ones(1, np.float32)),
    ]
    inputs = [(name, "INT64", ["batch", "length"]) for name in ("input_ids", "attention_mask")]
    return model(nodes, inputs, [("probabilities", "FP32", ["batch", len(SUBJECTS)])], constants)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description="Makes the tokenizer and the ONNX model of this example.")
    parser.add_argument("--into", type=Path, default=HERE / "models", help="the model repository (default: %(default)s)")
    into = parser.parse_args().into
    if into.resolve() != HERE / "models":
        shutil.copytree(HERE / "models", into, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    texts, subjects = examples()
    tokenizer = train_tokenizer(texts)
    tokenizer.save(str(into / "text_tokenizer/1/tokenizer.json"))
    (into / "text_encoder/1").mkdir(parents=True, exist_ok=True)
    (into / "text_encoder/1/model.onnx").write_bytes(encoder(train_scores(tokenizer, texts, subjects)))
    print(f"wrote tokenizer.json with {tokenizer.get_vocab_size()} tokens and model.onnx to {into}")


if __name__ == "__main__":
    main()
