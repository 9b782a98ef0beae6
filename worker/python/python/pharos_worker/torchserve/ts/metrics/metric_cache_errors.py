"""The exceptions of the metrics interface."""

try:
    from yaml import YAMLError
except ImportError:

    class YAMLError(Exception):
        """A replacement if PyYAML is not installed."""


class GeneralMetricsCacheError(Exception):
    """A metrics file is invalid."""

    def __init__(self, message):
        super().__init__(f"Generic error: {message}")


class MetricsCacheIOError(IOError):
    """A metrics file cannot be read."""

    def __init__(self, message):
        super().__init__(f"Error reading file: {message}")


class MetricsCachePyYamlError(YAMLError):
    """A metrics file is not YAML."""

    def __init__(self, message):
        super().__init__(f"Error parsing file: {message}")


class MetricsCacheTypeError(TypeError):
    """An argument has the wrong type."""

    def __init__(self, message):
        super().__init__(f"{message}")


class MetricsCacheValueError(ValueError):
    """An argument has an invalid value."""

    def __init__(self, message):
        super().__init__(f"{message}")


class MetricsCacheKeyError(KeyError):
    """The metric does not exist."""

    def __init__(self, message):
        super().__init__(f"{message}")
