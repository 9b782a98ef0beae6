"""The base classes of handlers of TorchServe's predecessor, Multi Model Server."""
