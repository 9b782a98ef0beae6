"""Downloads of models from the Hugging Face Hub."""

PATTERNS = ["*.json", "*.pt", "*.bin", "*.txt", "*.model", "*.pth", "*.safetensors", "original/*"]
"""The files of PyTorch checkpoints."""


def download_model(
    model_id="meta-llama/Meta-Llama-3.1-8B-Instruct", revision="main", model_path=".cache", use_auth_token=True
):
    """Downloads the checkpoint of a model and returns its directory. By default with the user's token (`HF_TOKEN`)."""
    from huggingface_hub import snapshot_download

    return snapshot_download(
        repo_id=model_id, revision=revision, allow_patterns=PATTERNS, cache_dir=model_path, token=use_auth_token
    )
