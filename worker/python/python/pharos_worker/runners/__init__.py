"""Runners for models without code: each module serves one kind of model file.

A runner is a class `TritonPythonModel` like in a model's own code, with `auto_complete_config`, `initialize` and `execute`.
The worker uses no other interface of it. The module has the name of the backend.
"""
