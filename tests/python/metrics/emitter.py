"""Models that emit metrics."""

from pathlib import Path


def emitter(folder: Path, name: str, batch: int = 0, **parameters) -> None:
    """Writes a model of the function `emit` into the repository `folder`."""
    (folder / name / "1").mkdir(parents=True)
    entry = 'parameters {{\n  key: "{}"\n  value {{ string_value: "{}" }}\n}}\n'
    tensors = "".join(
        f'{kind} [ {{ name: "{kind.upper()}0" data_type: TYPE_FP32 dims: [ -1 ] }} ]\n' for kind in ("input", "output")
    )
    batching = "dynamic_batching { max_queue_delay_microseconds: 50000 }\n" if batch else ""
    text = f'name: "{name}"\nbackend: "test"\nmax_batch_size: {batch}\n{tensors}{batching}'
    text += "".join(entry.format(key, value) for key, value in {"function": "emit", **parameters}.items())
    (folder / name / "config.pbtxt").write_text(text)
