"""The report of the growth benchmark: tables in Markdown, and curves on logarithmic axes.

Both are functions of the results that `run.py` writes to `results.json`:

    python curves.py results.json FOLDER      # writes report.md and growth.svg again

The results are a JSON object: `setting`, a text, and `curves`, a list of `axis` (a text), `base` (of its ticks), `values` (numbers) and `lines`: protocol ->
for each value `rate` (requests per second), `p50` and `p99` (microseconds).
"""

import json
import math
import sys
from html import escape
from pathlib import Path

PANEL, HEIGHT, GAP, LEFT, TOP = 330, 190, 70, 60, 44
"""Sizes in pixels: width and height of a panel, the space between panels, left of and above the first one."""
QUANTITIES = {"rate": "requests/s", "p99": "99th percentile, us"}
STYLE = """
  text { font: 12px sans-serif; fill: #24292f } .head { font-weight: bold } .page { fill: #ffffff }
  .frame { fill: none; stroke: #9aa4ae } .grid { stroke: #9aa4ae; stroke-opacity: 0.3 }
  .line { fill: none; stroke-width: 2 } .http { stroke: #2563a8; fill: #2563a8 } .grpc { stroke: #b3261e; fill: #b3261e }
  polyline.http, polyline.grpc { fill: none } text.http, text.grpc { stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e6e6 } .page { fill: #1e2227 } .http { stroke: #5b9bdf; fill: #5b9bdf } .grpc { stroke: #f2b8b5; fill: #f2b8b5 }
  }
"""


def short(value: float) -> str:
    """Writes a number with a unit prefix: powers of 1024 for those of two above 1000, of 1000 otherwise."""
    binary = value >= 1024 and value == int(value) and int(value) & (int(value) - 1) == 0
    step, units = (1024, ("", "Ki", "Mi", "Gi")) if binary else (1000, ("", "k", "M", "G"))
    power = min(int(math.log(value, step) + 1e-9), 3) if value >= 1 else 0
    return f"{value / step**power:.3g}{units[power]}"


def markdown(results: dict) -> str:
    """Returns the tables."""
    lines = [results["setting"] + ".", ""]
    for curve in results["curves"]:
        names = [f"{protocol}, {label}" for protocol in curve["lines"] for label in QUANTITIES.values()]
        lines += [f"| {' | '.join([curve['axis'], *names])} |", "|---" * (len(names) + 1) + "|"]
        for at, value in enumerate(curve["values"]):
            numbers = [short(points[at][key]) for points in curve["lines"].values() for key in QUANTITIES]
            lines.append(f"| {' | '.join([short(value), *numbers])} |")
        lines.append("")
    return "\n".join(lines)


class Axis:
    """A logarithmic axis from `start` to `end` pixels, with a tick for each power of `base`."""

    def __init__(self, values: list, pixels: tuple, base: int = 10):
        self.low, self.high = math.log(min(values)), math.log(max(values))
        if self.high - self.low < 0.1:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        self.start, self.end = pixels
        powers = range(math.ceil(self.low / math.log(base) - 1e-9), math.floor(self.high / math.log(base) + 1e-9) + 1)
        self.ticks = [base**power for power in powers]

    def at(self, value: float) -> float:
        """Returns the position of a value."""
        return self.start + (math.log(value) - self.low) / (self.high - self.low) * (self.end - self.start)


def panel(curve: dict, key: str, left: float, top: float) -> list:
    """Draws one quantity of one curve."""
    across = Axis(curve["values"], (left, left + PANEL), curve["base"])
    numbers = [point[key] for points in curve["lines"].values() for point in points]
    up = Axis([min(numbers) / 1.2, max(numbers) * 1.2], (top + HEIGHT, top))
    if len(up.ticks) < 2:
        up.ticks = [min(numbers), max(numbers)]
    parts = [
        f'<rect class="frame" x="{left}" y="{top}" width="{PANEL}" height="{HEIGHT}"/>',
        f'<text class="head" x="{left}" y="{top - 8}">{QUANTITIES[key]}</text>',
        f'<text x="{left + PANEL / 2}" y="{top + HEIGHT + 34}" text-anchor="middle">{escape(curve["axis"])}</text>',
    ]
    for tick in across.ticks:
        x = across.at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + HEIGHT}"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + HEIGHT + 16}" text-anchor="middle">{short(tick)}</text>')
    for tick in up.ticks:
        y = up.at(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{left + PANEL}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for number, (protocol, points) in enumerate(curve["lines"].items()):
        places = [(across.at(value), up.at(point[key])) for value, point in zip(curve["values"], points)]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line {protocol}" points="{drawn}"/>')
        parts += [f'<circle class="{protocol}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places]
        x = left + PANEL - 44 * (len(curve["lines"]) - number)
        parts.append(f'<text class="{protocol}" x="{x}" y="{top - 8}">{protocol}</text>')
    return parts


def picture(results: dict) -> str:
    """Returns all curves as an SVG: a row for each, requests per second on the left, latency on the right."""
    width = LEFT + 2 * PANEL + GAP + 20
    height = TOP + len(results["curves"]) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<title>Requests per second and latency over clients, models, instances and bytes</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
    ]
    for row, curve in enumerate(results["curves"]):
        for column, key in enumerate(QUANTITIES):
            parts += panel(curve, key, LEFT + column * (PANEL + GAP), TOP + row * (HEIGHT + GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def write(results: dict, to: Path):
    """Writes the results, the tables and the picture into a folder, and prints the tables."""
    to.mkdir(parents=True, exist_ok=True)
    (to / "results.json").write_text(json.dumps(results, indent=1))
    (to / "report.md").write_text(markdown(results))
    (to / "growth.svg").write_text(picture(results))
    print(markdown(results), f"written to {to}", sep="\n")


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
