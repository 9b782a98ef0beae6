"""Configurations of models with implicit state."""

STATE = 'input_name: "S" output_name: "T" data_type: TYPE_INT64'
TWO = STATE + " dims: [ 2 ]"


def tensors(dims: str, more="") -> str:
    """Returns the tensors X and Y of INT64, and further outputs."""
    output = 'output [ {{ name: "{}" data_type: TYPE_INT64 dims: [ {} ] }} ]\n'
    outputs = "".join(output.format(name, dims) for name in ["Y", *more])
    return f'input [ {{ name: "X" data_type: TYPE_INT64 dims: [ {dims} ] }} ]\n{outputs}'


def sequences(states: str, strategy="oldest { max_candidate_sequences: 8 }") -> str:
    """Returns a sequence batcher; `states` is without the braces."""
    return f"max_batch_size: 4 sequence_batching {{ {strategy} state [ {{ {states} }} ] }}\n"


def stateful_model(function: str) -> str:
    """Returns the backend and its function."""
    return f'backend: "test" parameters {{ key: "function" value {{ string_value: "{function}" }} }}\n'
