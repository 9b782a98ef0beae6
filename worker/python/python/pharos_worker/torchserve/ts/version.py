"""The TorchServe release of this interface, as reported to handlers and in `Context.system_properties`."""

__version__ = "0.12.0"
