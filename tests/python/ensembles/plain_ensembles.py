"""Configurations of models with one function, from VALUE to SUM, and of ensembles of them."""

from harness.generate import backend_of


def plain(name: str, function: str, more: str = "") -> str:
    """Returns a model from VALUE to SUM without sequences."""
    return f"""name: "{name}" backend: "{backend_of(function)}" max_batch_size: 4
input [ {{ name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }} ]
parameters {{ key: "function" value {{ string_value: "{function}" }} }}
{more}
"""


def ensemble(*members: str, more: str = "", kind: str = "INT32", ends=("VALUE", "SUM")) -> str:
    """Returns an ensemble whose members run one after the other."""
    first, last = ends
    names = [first, *(f"t{number}" for number in range(1, len(members))), last]
    steps = "".join(
        f'step {{ model_name: "{member}" model_version: -1 input_map {{ key: "{first}" value: "{names[n]}" }} '
        f'output_map {{ key: "{last}" value: "{names[n + 1]}" }} }}\n'
        for n, member in enumerate(members)
    )
    return f"""platform: "ensemble" max_batch_size: 4 {more}
input [ {{ name: "{first}" data_type: TYPE_{kind} dims: [ 1 ] }} ]
output [ {{ name: "{last}" data_type: TYPE_{kind} dims: [ 1 ] }} ]
ensemble_scheduling {{ {steps} }}
"""
