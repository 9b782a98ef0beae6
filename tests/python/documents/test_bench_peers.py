"""The report of `make bench-peers`: its tables, goals and picture, from invented results."""

import importlib.util
import xml.etree.ElementTree as xml

import pytest

from harness.server import ROOT

spec = importlib.util.spec_from_file_location("bench_peers_report", ROOT / "tests/bench_peers/report.py")
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)

LIMIT = 200.0


def row(server: str, rates: list, model: str = "encoder", clients: int = 8) -> dict:
    """Returns a row with these requests per second; a text instead of a number is the error of a round."""
    rounds = []
    for rate in rates:
        measured = {"rate": rate, "p50": 40.0, "p99": 55.5, "processor": 0.02, "processor_ms": 9.9, "others": 0.05}
        rounds.append({"error": rate} if isinstance(rate, str) else measured)
    return {"model": model, "server": server, "clients": clients, "rounds": rounds}


def results(*rows) -> dict:
    """Returns results with three rounds of these rows."""
    servers = [{"name": name, "version": "1.0", "setup": "`<defaults>`"} for name in ("Pharos", "Peer <A>", "Peer B")]
    limit = [{"1": 100.0, "32": LIMIT}] * 3
    return {
        "machine": {"date": "2026-11-23", "processors": "2 x invented"},
        "setting": {"rounds": 3, "seconds": 5.0, "threads": 2, "processes": 1},
        "servers": servers,
        "limits": {"digits": [{"1": 90_000.0, "32": 1_200_000.0}] * 3, "encoder": limit},
        "rows": list(rows),
    }


BOTH = (row("Peer B", [150.0, 160.0, 155.0]), row("Peer <A>", [100.0, 90.0, 95.0]), row("Pharos", [196.0, 190.0, 198.0]))


def test_table_has_medians_ranges_and_shares():
    """The servers are in the order of the results, each with its share of the largest limit."""
    lines = report.table(results(*BOTH), "encoder", 8)
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| Pharos", "| Peer <A>", "| Peer B"]
    assert lines[4].startswith("| Pharos | 196 (190 to 198) | 40.0 (40.0 to 40.0) | 55.5 (55.5 to 55.5) | 0.980 (0.950 to 0.990) |")
    assert lines[4].endswith("| 9.90 | 0.02 |")


@pytest.mark.parametrize(
    "own, verdicts",
    [
        ([196.0, 190.0, 198.0], ["reached", "reached"]),
        ([190.0, 193.0, 192.0], ["MISSED", "reached"]),
        ([150.0, 150.0, 150.0], ["MISSED", "MISSED"]),
    ],
)
def test_goals(own, verdicts):
    """Pharos is compared with the limit, and with the fastest peer in the same rounds."""
    told = report.goals(results(row("Pharos", own), *BOTH[:2]))
    assert [line.rpartition(" ")[2] for line in told] == verdicts, told
    assert "times the fastest, Peer B" in told[1]


def test_failed_rounds_are_listed_and_not_counted():
    """A round with an error has no part in medians and ratios; a server that never started has no row."""
    found = results(
        row("Pharos", [196.0, "no response\nmore", 198.0]), row("Peer B", [150.0, 400.0, 155.0]), row("Peer <A>", ["ended"])
    )
    text = report.markdown(found)
    assert "### Failures\n\n- encoder, 8 clients, Pharos: no response\n- encoder, 8 clients, Peer <A>: ended\n" in text
    assert "| Pharos | 197 (196 to 198) |" in text and text.count("| Peer <A> |") == 1
    assert "1.29 (1.28 to 1.31) times the fastest" in text


@pytest.mark.parametrize(
    "value, text",
    [(25_432.1, "25,400"), (196.4, "196"), (40.04, "40.0"), (1.234, "1.23"), (0.9784, "0.978"), (0.0123, "0.012")],
)
def test_numbers(value, text):
    """Numbers have at most three significant digits."""
    assert report.number(value) == text


def test_picture_has_a_bar_for_each_row(tmp_path):
    """The picture is valid XML with a bar and a range for each row, within its width; the limit is drawn where it has a place."""
    found = results(*BOTH, row("Pharos", [9000.0, 9100.0, 9200.0], "digits", 1))
    report.write(found, tmp_path / "to")
    assert (tmp_path / "to/report.md").read_text() == report.markdown(found) and (tmp_path / "to/results.json").exists()
    root = xml.fromstring((tmp_path / "to/report.svg").read_text())
    bars = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if one.get("class").startswith("bar")]
    assert [one.get("class") for one in bars] == ["bar own", "bar own", "bar", "bar"]
    assert all(float(one.get("x")) + float(one.get("width")) < report.WIDTH for one in bars)
    lines = [one.get("class") for one in root.iter("{http://www.w3.org/2000/svg}line")]
    assert lines.count("range") == 4 and lines.count("limit") == 1, "the limit of digits is out of scale"
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "Peer <A>" in texts and "ONNX Runtime in a loop: 200" in texts
