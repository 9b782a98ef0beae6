"""Writes a random Llama with a tokenizer and a chat template in Hugging Face's layout: tests/vllm/tiny.py FOLDER. Needs transformers."""

import sys

import tokenizer
import torch
from transformers import LlamaConfig, LlamaForCausalLM

folder = sys.argv[1]
tokenizer.write(folder)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=tokenizer.SIZE,
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
