"""The tokens of the backend `text` are those of Python's `tokenizers`: ten thousand texts in more than thirty scripts, for each kind of
tokenizer. Their vocabularies of some thousand tokens are trained with other texts of the same scripts.

Python's library has Oniguruma for the patterns of tokenizers, and the backend another library: their tables of Unicode could differ.
"""

import functools
import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from backends.script_texts import script_texts
from harness.server import Server
from harness.text_models import SPECIAL, TextModel, needs_text

pytestmark = needs_text
BATCH = 2000
"""The texts of a request, which has at most 2048."""
SIZE = 14_000
"""The tokens of a vocabulary."""
MARKS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS_OF_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@functools.cache
def corpus() -> list:
    """Returns the texts that the vocabularies are trained with."""
    return script_texts(5_000, seed=2, odd=False)


def word_piece(**normalizer) -> Tokenizer:
    """Returns a tokenizer as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(corpus(), trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=SPECIAL, show_progress=False))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_pairs(before=None) -> Tokenizer:
    """Returns a tokenizer as RoBERTa has it, or one whose pattern of words is another."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = before or pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_pairs_of_qwen() -> Tokenizer:
    """Returns a tokenizer as Qwen's embedding models have it."""
    split = pre_tokenizers.Split(Regex(WORDS_OF_QWEN), "isolated")
    tokenizer = byte_pairs(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def unigram() -> Tokenizer:
    """Returns a tokenizer as XLM-RoBERTa has it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(vocab_size=SIZE, special_tokens=MARKS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


KINDS = {"word_piece": lambda: word_piece(lowercase=True), "byte_pairs": byte_pairs, "unigram": unigram}
VARIANTS = {"word_piece_cased": lambda: word_piece(lowercase=False, strip_accents=False), "byte_pairs_of_qwen": byte_pairs_of_qwen}
"""Further tokenizers, which get six of ten thousand texts."""


@pytest.fixture(scope="module")
def texts() -> list:
    """The texts to tokenize."""
    return script_texts(10_000, seed=1)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with a model of each kind, and the tokenizers."""
    folder = tmp_path_factory.mktemp("tokenizers")
    places = {kind: folder / "models" / kind / "1" for kind in KINDS | VARIANTS}
    for kind, make in (KINDS | VARIANTS).items():
        TextModel(places[kind], tokenizer=make()).sentence_transformer()
    # Read from the files, as the server does. The last bit of a score can change when it is read, and then the best of two divisions of
    # a text that are equally good.
    tokenizers = {kind: Tokenizer.from_file(str(place / "tokenizer.json")) for kind, place in places.items()}
    with Server(folder, [folder / "models"]) as server:
        yield server, tokenizers


def ask(server, path: str, ascii_only: bool = True, **body):
    """Sends JSON; returns the JSON of the answer, which must be a success."""
    status, answer = server.ask("POST", path, json.dumps(body, ensure_ascii=ascii_only).encode())
    assert status == 200, answer
    return json.loads(answer)


def same(texts: list, got: list, wanted: list):
    """Asserts that the results of all texts are equal."""
    found = [(ascii(text), one, other) for text, one, other in zip(texts, got, wanted, strict=True) if one != other]
    assert not found, f"{len(found)} of {len(texts)} texts differ (text, server, library): {found[:5]}"


@pytest.mark.parametrize("kind", [*KINDS, *VARIANTS])
def test_tokens_of_texts_in_many_scripts(served, texts, kind):
    """The ids of `/tokenize` and their tokens, and the texts of `/decode`, in requests of many texts. Characters are escapes of JSON, or
    as they are in the requests that `/decode` follows."""
    server, tokenizer = served[0], served[1][kind]
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    used = set()
    for number in range(0, len(texts) // BATCH, 1 if kind in KINDS else 2):
        batch, decodes = texts[number * BATCH : (number + 1) * BATCH], number in (2, 3)
        ids = [encoding.ids for encoding in tokenizer.encode_batch(batch)]
        lists = ask(server, "/tokenize", not decodes, model=kind, inputs=batch)
        same(batch, [[token["id"] for token in tokens] for tokens in lists], ids)
        same(batch, [[token["text"] for token in tokens] for tokens in lists], [[names[one] for one in tokens] for tokens in ids])
        if decodes:
            decoded = ask(server, "/decode", model=kind, ids=ids, skip_special_tokens=True)
            same(batch, decoded, tokenizer.decode_batch(ids, skip_special_tokens=True))
        used.update(*ids)
    # Else the texts would have unknown characters only, or the vocabulary no words.
    assert len(used) > SIZE / 3, len(used)


@pytest.mark.parametrize("kind", [*KINDS, *VARIANTS])
def test_tokens_without_special_ones(served, texts, kind):
    """Special tokens in a text stay, and `/decode` keeps all of them if asked to."""
    server, tokenizer, batch = served[0], served[1][kind], texts[:BATCH]
    ids = [encoding.ids for encoding in tokenizer.encode_batch(batch, add_special_tokens=False)]
    lists = ask(server, "/tokenize", model=kind, inputs=batch, add_special_tokens=False)
    same(batch, [[token["id"] for token in tokens] for tokens in lists], ids)
    decoded = ask(server, "/decode", model=kind, ids=ids, skip_special_tokens=False)
    same(batch, decoded, tokenizer.decode_batch(ids, skip_special_tokens=False))


@pytest.mark.parametrize("kind", [*KINDS, *VARIANTS])
def test_surrogates(served, kind):
    """Two that belong together are a character. One alone is refused, and what clients send in its place is a character like others."""
    server, tokenizer = served[0], served[1][kind]
    for escaped, text in [(r"a\ud83d\ude00b", "a😀b"), (r"a\ufffdb", "a\ufffdb"), (r"\u0000", "\0")]:
        status, answer = server.ask("POST", "/tokenize", f'{{"model": "{kind}", "inputs": ["{escaped}"]}}')
        assert (status, [token["id"] for token in json.loads(answer)[0]]) == (200, tokenizer.encode(text).ids)
    for escaped in (r"a\ud83d", r"\ude00b", r"\ude00\ud83d"):
        assert server.ask("POST", "/tokenize", f'{{"model": "{kind}", "inputs": ["{escaped}"]}}')[0] == 422
