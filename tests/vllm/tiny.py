"""Writes a random Llama with a tokenizer and a chat template in Hugging Face's layout: tests/vllm/tiny.py FOLDER. With `images` as the
second argument, writes the files of a LLaVA that reads images, without weights. Needs transformers."""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip import CLIPImageProcessor

CONTENT = "{{ message.content }}"
PARTS = "{% for part in message.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>CONTENT{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

folder, reads_images = sys.argv[1], sys.argv[2:] == ["images"]
bytes_of_texts = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = bytes_of_texts, decoders.ByteLevel()
special = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", *["<image>", "<pad>"] * reads_images]
trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
tokenizer.train_from_iterator(["one two three four five six seven eight nine ten"] * 20, trainer)
tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
wrapped.chat_template = TEMPLATE.replace("CONTENT", PARTS if reads_images else CONTENT)
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
if reads_images:
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14, projection_dim=64
    )
    # An image has two times two patches, and a token for each.
    whole = LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        vision_config=vision,
        text_config=config,
        image_token_index=special.index("<image>"),
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    whole.save_pretrained(folder)
    wrapped.pad_token = "<pad>"
    scaled = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        scaled, wrapped, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder)
else:
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
