"""The backend `llamacpp` in tests: whether it is built, the usual configuration of a small model, and a client."""

import openai
import pytest

from harness.server import binary

LIBRARY = binary().parent / "backends/llamacpp/libpharos_llamacpp.so"
needs_llamacpp = pytest.mark.skipif(
    not LIBRARY.is_file(), reason=f"{LIBRARY} is not built: `make llamacpp` builds it, with a C++ compiler"
)
MAX_SEQUENCES, CONTEXT = 4, 512
SETTINGS = f"""
backend: "llamacpp"
parameters {{ key: "max_sequences" value: {{ string_value: "{MAX_SEQUENCES}" }} }}
parameters {{ key: "threads" value: {{ string_value: "1" }} }}
parameters {{ key: "context_length" value: {{ string_value: "{CONTEXT}" }} }}
"""


def client_of(server, **more) -> openai.OpenAI:
    """Returns OpenAI's client, which does not repeat requests."""
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, **more)
