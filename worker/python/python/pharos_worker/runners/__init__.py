"""Models that need no code: each module serves one kind of file.

A runner is a class of the form in which models are written, `TritonPythonModel` with `auto_complete_config`,
`initialize` and `execute`; nothing in it is known to the worker but that. The name of the module is the backend's.
"""
