"""The report of `make bench-growth`: tables and curves for invented results."""

import importlib.util
import xml.etree.ElementTree as xml

import pytest

from harness.server import ROOT

spec = importlib.util.spec_from_file_location("bench_growth_curves", ROOT / "tests/bench_growth/curves.py")
curves = importlib.util.module_from_spec(spec)
spec.loader.exec_module(curves)

SVG = "{http://www.w3.org/2000/svg}"


def point(rate: float, p99: float) -> dict:
    """Returns the result of a measurement."""
    return {"rate": rate, "p50": p99 / 2, "p99": p99}


RESULTS = {
    "setting": "two processors",
    "curves": [
        {
            "axis": "clients",
            "base": 10,
            "values": [1, 10, 100],
            "lines": {
                "http": [point(1_000, 100), point(10_000, 200), point(20_000, 5_000)],
                "grpc": [point(500, 200), point(5_000, 300), point(8_000, 9_000)],
            },
        },
        {"axis": "bytes", "base": 32, "values": [64, 1 << 20], "lines": {"http": [point(1_000, 100), point(1_000, 100)]}},
    ],
}


@pytest.mark.parametrize(
    "value, text", [(1, "1"), (0.5, "0.5"), (1000, "1k"), (1024, "1Ki"), (24_312.7, "24.3k"), (1 << 26, "64Mi"), (512, "512")]
)
def test_numbers_are_short(value, text):
    assert curves.short(value) == text


def test_the_tables_have_a_row_for_each_value():
    lines = curves.markdown(RESULTS).splitlines()
    assert "| 10 | 10k | 200 | 5k | 300 |" in lines
    assert "| 1Mi | 1k | 100 |" in lines


def test_the_curves_rise_where_the_numbers_do():
    root = xml.fromstring(curves.picture(RESULTS))
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [3, 3, 3, 3, 2, 2]
    (first, *_, last) = ([float(number) for number in place.split(",")] for place in lines[0])
    assert last[0] == first[0] + curves.PANEL
    assert last[1] < first[1], "y grows downwards"
    level = [place.split(",")[1] for place in lines[4]]
    assert level[0] == level[1], "equal numbers"
    assert all(float(circle.attrib["cx"]) > 0 for circle in root.iter(f"{SVG}circle"))
