"""The backend `vllm` in tests: the interpreter that has it, and the arguments and variables of a small engine on CPUs."""

import os

import pytest

PYTHON = os.environ.get("PHAROS_VLLM_PYTHON", "")
needs_vllm = [
    pytest.mark.skipif(not PYTHON, reason="PHAROS_VLLM_PYTHON names no interpreter with vLLM: `make test-vllm` installs it (6 GB)"),
    pytest.mark.timeout(600),
]
OWN = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
ADAPTERS = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8}
ARGUMENTS = {"model": "hf"} | OWN | ADAPTERS
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
