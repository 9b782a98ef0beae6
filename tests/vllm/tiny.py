"""Writes a random Llama with a tokenizer and a chat template in Hugging Face's layout: tests/vllm/tiny.py FOLDER. Needs transformers."""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

folder = sys.argv[1]
bytes_of_texts = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = bytes_of_texts, decoders.ByteLevel()
special = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
tokenizer.train_from_iterator(["one two three four five six seven eight nine ten"] * 20, trainer)
tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
wrapped.chat_template = TEMPLATE
wrapped.save_pretrained(folder)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=1,
    eos_token_id=2,
)
LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
