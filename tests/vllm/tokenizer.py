"""Writes a tokenizer and a chat template in Hugging Face's layout: tests/vllm/tokenizer.py FOLDER. Needs transformers."""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CONTENT = "{{ message.content }}"
PARTS = "{% for part in message.content %}{{ part.text if part.type == 'text' else 'FILE' }}{% endfor %}"
FILES = {"": [], "images": ["<image>"], "audio": ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"]}
"""The tokens at the place of a file in a prompt, by what the model reads besides texts."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>CONTENT{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZE = 512
"""The most tokens of the vocabulary."""


def write(folder: str, reads: str = "") -> PreTrainedTokenizerFast:
    """Writes the files of a tokenizer, which it returns. With images or audio, the template reads the parts of contents."""
    bytes_of_texts = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = bytes_of_texts, decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", *FILES[reads], *["<pad>"] * bool(reads)]
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["one two three four five six seven eight nine ten"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    wrapped.chat_template = TEMPLATE.replace("CONTENT", PARTS.replace("FILE", "".join(FILES[reads])) if reads else CONTENT)
    wrapped.save_pretrained(folder)
    return wrapped


if __name__ == "__main__":
    write(sys.argv[1])
