"""Models with iterative sequences (`iterative_sequence`), which the server continues without further requests."""

import numpy as np

DELAY_MS = 10
CONFIG = """backend: "test" max_batch_size: 4
input [ {{ name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "DONE" data_type: TYPE_INT32 dims: [ 1 ] }}, {{ name: "TOGETHER" data_type: TYPE_INT32 dims: [ 1 ] }} ]
parameters {{ key: "function" value {{ string_value: "countdown" }} }}
parameters {{ key: "delay_ms" value {{ string_value: "{delay}" }} }}
{more}
sequence_batching {{ {batching} }}"""
DECOUPLED = "model_transaction_policy { decoupled: true }"


def config(batching: str, more="", delay=DELAY_MS) -> str:
    """Returns a complete configuration."""
    return CONFIG.format(batching=batching, more=more, delay=delay)


OLDEST = "iterative_sequence: true oldest { max_candidate_sequences: 8 }"
MODELS = {
    "direct": config("iterative_sequence: true direct { }"),
    "oldest": config(OLDEST),
    "stream": config(OLDEST, DECOUPLED),
    "fast": config(OLDEST, DECOUPLED, 0),
    "plain": config("direct { }"),
}


def count_of(kind, count: int) -> list:
    """Returns the input COUNT with this value."""
    tensor = kind.InferInput("COUNT", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.full((1, 1), count, np.int32))
    return [tensor]
