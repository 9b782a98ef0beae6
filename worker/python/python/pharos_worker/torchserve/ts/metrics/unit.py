"""Full names of units."""

UNITS = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "percent": "Percent",
    "count": "Count",
    "MB": "Megabytes",
    "GB": "Gigabytes",
    "kB": "Kilobytes",
    "B": "Bytes",
    "": "unit",
    None: "unit",
}


class Units:
    """The same as an object."""

    def __init__(self):
        self.units = dict(UNITS)
