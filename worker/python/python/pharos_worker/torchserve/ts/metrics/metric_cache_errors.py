"""What the calls for metrics raise."""

try:
    from yaml import YAMLError
except ImportError:

    class YAMLError(Exception):
        """Stands in where PyYAML is not installed."""


class GeneralMetricsCacheError(Exception):
    """A file of metrics could not be used."""

    def __init__(self, message):
        super().__init__(f"Generic error: {message}")


class MetricsCacheIOError(IOError):
    """A file of metrics could not be read."""

    def __init__(self, message):
        super().__init__(f"Error reading file: {message}")


class MetricsCachePyYamlError(YAMLError):
    """A file of metrics is no YAML."""

    def __init__(self, message):
        super().__init__(f"Error parsing file: {message}")


class MetricsCacheTypeError(TypeError):
    """An argument is of the wrong type."""

    def __init__(self, message):
        super().__init__(f"{message}")


class MetricsCacheValueError(ValueError):
    """An argument has a value that is not allowed."""

    def __init__(self, message):
        super().__init__(f"{message}")


class MetricsCacheKeyError(KeyError):
    """There is no such metric."""

    def __init__(self, message):
        super().__init__(f"{message}")
