"""The release of TorchServe whose interface this is; handlers and `Context.system_properties` are told it."""

__version__ = "0.12.0"
