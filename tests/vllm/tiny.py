"""Writes a random Llama with a tokenizer and a chat template in Hugging Face's layout: tests/vllm/tiny.py FOLDER. With `images` as the
second argument, writes the files of a LLaVA that reads images, with `audio` those of a Qwen2-Audio, both without weights. Needs
transformers."""

import sys

import tokenizer
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaProcessor,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioProcessor,
    Qwen2Config,
    WhisperFeatureExtractor,
)
from transformers.models.clip import CLIPImageProcessor

folder, reads = sys.argv[1], "".join(sys.argv[2:])
wrapped = tokenizer.write(folder, reads)
wrapped.pad_token = "<pad>" if reads else None
torch.manual_seed(0)
sizes = {
    "vocab_size": tokenizer.SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
config = LlamaConfig(**sizes)
if reads == "audio":
    encoder = Qwen2AudioEncoderConfig(
        num_mel_bins=80, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128, d_model=64
    )
    Qwen2AudioConfig(
        architectures=["Qwen2AudioForConditionalGeneration"],
        audio_config=encoder,
        text_config=Qwen2Config(**sizes),
        audio_token_index=wrapped.convert_tokens_to_ids("<|AUDIO|>"),
    ).save_pretrained(folder)
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=80), wrapped).save_pretrained(folder)
elif reads == "images":
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14, projection_dim=64
    )
    # An image has two times two patches, and a token for each.
    whole = LlavaConfig(
        architectures=["LlavaForConditionalGeneration"],
        vision_config=vision,
        text_config=config,
        image_token_index=wrapped.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    whole.save_pretrained(folder)
    scaled = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        scaled, wrapped, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder)
else:
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
