"""Writes a language model as a directory of ONNX Runtime GenAI, whose next token follows from the last one.

The weights are chosen so that the text is known, whatever else the engine computes in the same step:

- after `one` comes `two`, up to `nine`, and then the end of the text;
- after `<|assistant|>`, with which the chat template ends, comes `hello`, then `world`, then the end;
- after `loop` comes `loop`, without end;
- after `dice` comes one of six words with equal probability, and after each of them `dice`;
- after `euro` come the three bytes of a character, one by one, then the end;
- after `recall` comes the word from `one` to `nine` that was most frequent in the text: it is read from the KV cache;
- after each capital letter comes the next one, and `A` after `Z`, without end;
- after any other token, all tokens are equally likely.

There are two forms. The usual one has the operator GroupQueryAttention, a batch with padding, and a cache for each row. The paged one, for the
dynamic batches of the engine, has all tokens in a row and a cache in blocks. Its operator PagedAttention runs on GPUs alone, therefore the paged
model has a cache that it does not use, and no `recall`.
"""

import json
import string
from pathlib import Path

import numpy as np

from harness import onnx_file

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COUNT = "one two three four five six seven eight nine".split()
SIDES = "ace deuce trey cater cinque sice".split()
LETTERS = string.ascii_uppercase
SPECIAL = ["<unk>", "<s>", "</s>", *(f"<|{role}|>" for role in ("user", "assistant", "system"))]
UNKNOWN, BEGIN, END = range(3)
CONTEXT_LENGTH = 32_768
LIKELY = 25.0
"""The difference of the logits between a token that follows and all others."""
WIDTH = 16
"""The numbers of a token in the KV cache."""
SPACE = "\u0120"
"""The space in a byte-level vocabulary."""
BLOCK = 16
"""The tokens of a block of the paged cache."""
BLOCKS = 4 * CONTEXT_LENGTH // BLOCK


def letters() -> list:
    """Returns the characters that stand for the 256 bytes in a byte-level vocabulary, as in GPT-2."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


def vocabulary() -> tuple:
    """Returns the tokens in order, and the merges: a word is merged letter by letter."""
    tokens, merges = [*SPECIAL, *letters()], []
    for word in [*COUNT, *SIDES, "hello", "world", "loop", "dice", "euro", "recall"]:
        for begin in (SPACE, ""):
            text = begin + word
            for length in range(2, len(text) + 1):
                if text[:length] not in tokens:
                    tokens.append(text[:length])
                    merges.append([text[: length - 1], text[length - 1]])
    return tokens, merges


def followers(ids: dict) -> list:
    """Returns the pairs of tokens of which the second one is likely after the first one. A word begins with a space, except at the beginning of a text."""
    word = lambda text: ids[SPACE + text]  # noqa: E731
    after = lambda text, follower: [(ids[text], follower), (ids[SPACE + text], follower)]  # noqa: E731
    pairs = [pair for text, follower in zip(COUNT, COUNT[1:]) for pair in after(text, word(follower))] + after(COUNT[-1], END)
    pairs += [(ids["<|assistant|>"], word("hello")), (word("hello"), word("world")), (word("world"), END), *after("loop", word("loop"))]
    pairs += [pair for side in SIDES for pair in (*after("dice", word(side)), (word(side), word("dice")))]
    pairs += [(ids[before], ids[after]) for before, after in zip(LETTERS, LETTERS[1:] + LETTERS[:1])]
    bytes_of = [ids[letters()[byte]] for byte in "€".encode()]
    return pairs + after("euro", bytes_of[0]) + list(zip(bytes_of, [*bytes_of[1:], END]))


def write_model(folder: Path, paged=False, chat_template: str | None = CHAT_TEMPLATE, search: dict | None = None, blocks=BLOCKS):
    """Writes the directory of a model; `search` has further defaults of sampling, `blocks` are those of the paged cache."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens, merges = vocabulary()
    ids = {text: number for number, text in enumerate(tokens)}
    (folder / "model.onnx").write_bytes(paged_graph(tokens, ids) if paged else padded_graph(tokens, ids))
    plain = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    special = [{"id": number, "content": text} | plain for number, text in enumerate(SPECIAL)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    files = {
        "tokenizer": {
            "version": "1.0",
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [BEGIN], "tokens": ["<s>"]}},
            },
            "model": {"type": "BPE", "vocab": ids, "merges": merges, "unk_token": None, "byte_fallback": False, "ignore_merges": False},
        },
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "model_max_length": CONTEXT_LENGTH,
        }
        | ({"chat_template": chat_template} if chat_template else {}),
        "genai_config": configuration(len(tokens), paged, search or {}, blocks),
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def configuration(count: int, paged: bool, search: dict, blocks: int) -> dict:
    """Returns `genai_config.json`."""
    inputs = {"input_ids": "input_ids", "past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    more = ["cumulative_sequence_lengths", "past_sequence_lengths", "block_table"] if paged else ["attention_mask"]
    decoder = {
        "session_options": {"provider_options": [], "intra_op_num_threads": 1},
        "filename": "model.onnx",
        "head_size": WIDTH,
        "hidden_size": WIDTH,
        "inputs": inputs | {name: name for name in more},
        "outputs": {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"},
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
    }
    config = {
        "model": {
            "bos_token_id": BEGIN,
            "context_length": CONTEXT_LENGTH,
            "decoder": decoder,
            "eos_token_id": END,
            "pad_token_id": END,
            "type": "llama",
            "vocab_size": count,
        },
        "search": {"max_length": CONTEXT_LENGTH, "past_present_share_buffer": not paged} | search,
    }
    return config | ({"engine": {"dynamic_batching": {"block_size": BLOCK, "num_blocks": blocks, "max_batch_size": 4}}} if paged else {})


def likelihoods(tokens: list, ids: dict) -> np.ndarray:
    """Returns the logits after each token."""
    table = np.zeros((len(tokens), len(tokens)), np.float32)
    for before, after in followers(ids):
        table[before, after] = LIKELY
    return table


def padded_graph(tokens: list, ids: dict) -> bytes:
    """Returns the model of the usual form: rows of `input_ids` with a mask."""
    # The cache keeps which of the words a token is; with queries of zero, attention is the mean over all tokens.
    kept = np.zeros((len(tokens), WIDTH), np.float32)
    recalled = np.zeros((WIDTH, len(tokens)), np.float32)
    asks = np.zeros((len(tokens), 1), np.float32)
    for number, text in enumerate(COUNT):
        kept[[ids[text], ids[SPACE + text]], number] = 1
        recalled[number, ids[SPACE + text]] = LIKELY * CONTEXT_LENGTH
    asks[[ids["recall"], ids[SPACE + "recall"]]] = 1
    constants = {"table": likelihoods(tokens, ids), "kept": kept, "recalled": recalled, "asks": asks, "none": np.zeros((1,), np.float32)}
    node = onnx_file.node
    nodes = [
        node("Gather", ["table", "input_ids"], ["followers"]),
        node("Gather", ["kept", "input_ids"], ["values"]),
        node("Mul", ["values", "none"], ["zeros"]),
        node("ReduceSum", ["attention_mask", "one"], ["lengths"], keepdims=0),
        node("Sub", ["lengths", "one"], ["last"]),
        node("Cast", ["last"], ["seqlens_k"], to=onnx_file.ELEMENT["INT32"]),
        node("Shape", ["attention_mask"], ["shape"]),
        node("Gather", ["shape", "second"], ["total"]),
        node("Cast", ["total"], ["total_length"], to=onnx_file.ELEMENT["INT32"]),
        node(
            "GroupQueryAttention",
            ["zeros", "zeros", "values", "past_key_values.0.key", "past_key_values.0.value", "seqlens_k", "total_length"],
            ["mean", "present.0.key", "present.0.value"],
            "com.microsoft",
            num_heads=1,
            kv_num_heads=1,
        ),
        node("MatMul", ["mean", "recalled"], ["memories"]),
        node("Gather", ["asks", "input_ids"], ["gate"]),
        node("Mul", ["memories", "gate"], ["answers"]),
        node("Add", ["followers", "answers"], ["logits"]),
    ]
    cache = lambda name, length: [(f"{name}.0.{kind}", "FP32", ["batch", 1, length, WIDTH]) for kind in ("key", "value")]  # noqa: E731
    return onnx_file.model(
        nodes,
        [("input_ids", "INT64", ["batch", "length"]), ("attention_mask", "INT64", ["batch", "total"]), *cache("past_key_values", "past")],
        [("logits", "FP32", ["batch", "length", len(tokens)]), *cache("present", "total")],
        [onnx_file.constant(name, "FP32", array) for name, array in constants.items()]
        + [onnx_file.constant("one", "INT64", np.array([1])), onnx_file.constant("second", "INT64", np.array(1))],
        ["com.microsoft"],
    )


def paged_graph(tokens: list, ids: dict) -> bytes:
    """Returns the model of the paged form: all tokens of all requests in one dimension."""
    node = onnx_file.node
    names = [f"0.{kind}" for kind in ("key", "value")]
    cache = lambda prefix: [(f"{prefix}.{name}", "FP32", ["blocks", BLOCK, 1, WIDTH]) for name in names]  # noqa: E731
    return onnx_file.model(
        [node("Gather", ["table", "input_ids"], ["logits"])] + [node("Identity", [f"past_key_values.{name}"], [f"present.{name}"]) for name in names],
        [
            ("input_ids", "INT64", ["tokens"]),
            ("cumulative_sequence_lengths", "INT32", ["requests_and_one"]),
            ("past_sequence_lengths", "INT32", ["requests"]),
            ("block_table", "INT32", ["requests", "most_blocks"]),
            *cache("past_key_values"),
        ],
        [("logits", "FP32", ["tokens", len(tokens)]), *cache("present")],
        [onnx_file.constant("table", "FP32", likelihoods(tokens, ids))],
    )
