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


def write_model(path: Path, chat_template: str | None = CHAT_TEMPLATE):
    """Writes the model."""
    tokens = vocabulary()
    ids = {text: number for number, (text, _) in enumerate(tokens)}
    width = -(-len(tokens) // 64) * 64
    inner = 64
    embeddings = np.zeros((len(tokens), width), np.float32)
    embeddings[range(len(tokens)), range(len(tokens))] = 1
    outputs = np.zeros((len(tokens), width), np.float32)
    for before, after in followers(ids):
        outputs[after, before] = 1
    zeros = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    tensors = {
        "token_embd.weight": embeddings,
        "output_norm.weight": np.ones(width, np.float32),
        "output.weight": outputs,
        "blk.0.attn_norm.weight": np.ones(width, np.float32),
        "blk.0.ffn_norm.weight": np.ones(width, np.float32),
        "blk.0.attn_q.weight": zeros(inner, width),
        "blk.0.attn_k.weight": zeros(inner, width),
        "blk.0.attn_v.weight": zeros(inner, width),
        "blk.0.attn_output.weight": zeros(width, inner),
        "blk.0.ffn_gate.weight": zeros(inner, width),
        "blk.0.ffn_up.weight": zeros(inner, width),
        "blk.0.ffn_down.weight": zeros(width, inner),
    }
    metadata = {
        "general.architecture": "llama",
        "general.name": "tests",
        "llama.context_length": CONTEXT_LENGTH,
        "llama.embedding_length": width,
        "llama.block_count": 1,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.attention.key_length": inner,
        "llama.attention.value_length": inner,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.dimension_count": inner,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        # Longer pieces are merged first.
        "tokenizer.ggml.scores": [float(len(text)) for text, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    path.write_bytes(encode(metadata, tensors))


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
