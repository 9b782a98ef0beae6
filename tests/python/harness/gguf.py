"""Writes a language model as a GGUF file of less than two megabytes, whose next token follows from the last one.

Its attention and its layers are zero: the embedding of the last token alone determines the next token. So the text is known, whatever
else the engine computes in the same step:

- after `one` comes `two`, up to `nine`, and then the end of the text;
- after `<|assistant|>`, with which the chat template ends, comes `hello`, then `world`, then the end;
- after `loop` comes `loop`, without end;
- after `dice` comes one of six words with equal probability, and after each of them `dice`;
- after any other token, all tokens are equally likely.

The format is described in `docs/gguf.md` of ggml.
"""

import string
import struct
from pathlib import Path

import numpy as np

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COUNT = "one two three four five six seven eight nine".split()
SIDES = "ace deuce trey cater cinque sice".split()
CONTEXT_LENGTH = 32_768
INNER = 64
"""The width of the attention and of the layers, which do nothing."""
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
"""Kinds of tokens."""


def vocabulary() -> list:
    """Returns the tokens as texts with their kinds. Words have all their beginnings as tokens, because a tokenizer merges two at a time."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [(f"<|{role}|>", CONTROL) for role in ("user", "assistant", "system")]
    texts = list("\u2581" + string.ascii_letters + string.digits + string.punctuation)
    for word in [*COUNT, *SIDES, "hello", "world", "loop", "dice"]:
        texts += [f"\u2581{word}"[:length] for length in range(2, len(word) + 2)]
    return tokens + [(text, NORMAL) for text in dict.fromkeys(texts)]


def followers(ids: dict) -> list:
    """Returns the pairs of tokens of which the second one is likely after the first one."""
    word = lambda text: ids[f"\u2581{text}"]  # noqa: E731
    end = ids["</s>"]
    pairs = list(zip(map(word, COUNT), [*map(word, COUNT[1:]), end]))
    pairs += [(ids["<|assistant|>"], word("hello")), (word("hello"), word("world")), (word("world"), end)]
    pairs += [(word("loop"), word("loop"))]
    pairs += [pair for side in map(word, SIDES) for pair in ((word("dice"), side), (side, word("dice")))]
    return pairs


def write_model(path: Path, chat_template: str | None = CHAT_TEMPLATE, pooling: int | None = None):
    """Writes the model. With `pooling`, a number of llama.cpp's `llama_pooling_type`, it makes embeddings: the embedding of a token has one
    element that is not zero, at the position of the token's id."""
    tokens, width = vocabulary(), embedding_width()
    ids = {text: number for number, (text, _) in enumerate(tokens)}
    outputs = np.zeros((len(tokens), width), np.float32)
    for before, after in followers(ids):
        outputs[after, before] = 1
    metadata = settings("llama", tokens)
    if pooling is not None:
        metadata["llama.pooling_type"] = pooling
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    path.write_bytes(encode(metadata, layers(width) | {"output.weight": outputs}))


def write_scorer(path: Path):
    """Writes a model that scores pairs of texts in the way of Qwen3's rerankers: the last token of the second text decides. From `one` to
    `nine`, the logits of "yes" are 1 to 9, and those of "no" are 5."""
    tokens, width = vocabulary(), embedding_width()
    ids = {text: number for number, (text, _) in enumerate(tokens)}
    head = np.zeros((2, width), np.float32)
    for logit, word in enumerate(COUNT, 1):
        # The norm multiplies the only element by the square root of the width.
        head[:, ids[f"\u2581{word}"]] = np.array([logit, 5]) / np.sqrt(width)
    metadata = settings("qwen3", tokens) | {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]}
    norms = {f"blk.0.attn_{name}_norm.weight": np.ones(INNER, np.float32) for name in "qk"}
    path.write_bytes(encode(metadata, layers(width) | norms | {"cls.output.weight": head}))


def write_adapter(path: Path, before: str, after: str):
    """Writes an adapter (LoRA) of the model with which one word comes after another one."""
    tokens, width = vocabulary(), embedding_width()
    ids = {text: number for number, (text, _) in enumerate(tokens)}
    first, second = np.zeros((1, width), np.float32), np.zeros((len(tokens), 1), np.float32)
    first[0, ids[f"\u2581{before}"]] = 1
    second[ids[f"\u2581{after}"], 0] = 9
    metadata = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora", "adapter.lora.alpha": 1.0}
    path.write_bytes(encode(metadata, {"output.weight.lora_a": first, "output.weight.lora_b": second}))


def embedding_width() -> int:
    """Returns the number of elements of an embedding: that of the tokens, rounded up."""
    return -(-len(vocabulary()) // 64) * 64


def layers(width: int) -> dict:
    """Returns the tensors that do nothing but to look up the embedding of a token."""
    count = len(vocabulary())
    embeddings = np.zeros((count, width), np.float32)
    embeddings[range(count), range(count)] = 1
    zeros = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    return {
        "token_embd.weight": embeddings,
        "output_norm.weight": np.ones(width, np.float32),
        "blk.0.attn_norm.weight": np.ones(width, np.float32),
        "blk.0.ffn_norm.weight": np.ones(width, np.float32),
        "blk.0.attn_q.weight": zeros(INNER, width),
        "blk.0.attn_k.weight": zeros(INNER, width),
        "blk.0.attn_v.weight": zeros(INNER, width),
        "blk.0.attn_output.weight": zeros(width, INNER),
        "blk.0.ffn_gate.weight": zeros(INNER, width),
        "blk.0.ffn_up.weight": zeros(INNER, width),
        "blk.0.ffn_down.weight": zeros(width, INNER),
    }


def settings(architecture: str, tokens: list) -> dict:
    """Returns the metadata of a model of an architecture."""
    own = {
        "context_length": CONTEXT_LENGTH,
        "embedding_length": embedding_width(),
        "block_count": 1,
        "feed_forward_length": INNER,
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
        "attention.key_length": INNER,
        "attention.value_length": INNER,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": INNER,
    }
    return {"general.architecture": architecture, "general.name": "tests"} | {f"{architecture}.{name}": value for name, value in own.items()} | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        # Longer pieces are merged first.
        "tokenizer.ggml.scores": [float(len(text)) for text, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip


def encode(metadata: dict, tensors: dict) -> bytes:
    """Returns a GGUF file of version 3."""
    alignment = 32
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, data = typed(value)
        head += [text(key), struct.pack("<I", kind), data]
    data = b""
    for name, tensor in tensors.items():
        data += bytes(-len(data) % alignment)
        shape = tensor.shape[::-1]
        head += [text(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))]
        data += tensor.tobytes()
    head = b"".join(head)
    return head + bytes(-len(head) % alignment) + data


def text(value: str) -> bytes:
    """Returns a text with its length."""
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def typed(value) -> tuple:
    """Returns the kind of a value and its bytes."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, text(value)
        case list():
            kind = 5 if isinstance(value[0], int) else typed(value[0])[0]
            elements = [struct.pack("<i", one) if kind == 5 else typed(one)[1] for one in value]
            return 9, struct.pack("<IQ", kind, len(value)) + b"".join(elements)
    raise TypeError(f"a value of GGUF cannot be {value!r}")
