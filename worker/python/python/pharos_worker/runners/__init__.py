"""What runs models that are a file without code: each module has a class of Triton's form, `TritonPythonModel`."""
