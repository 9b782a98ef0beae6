"""The report of the benchmark: tables in Markdown, and a picture of the requests per second.

Both are functions of the results that `run.py` collects and writes to `results.json`:

    python report.py results.json FOLDER      # writes report.md and report.svg again

The results are a JSON object:

- `machine`: name -> text
- `setting`: `rounds`, `seconds`, `threads`, `processes`
- `servers`: a list of `name`, `version`, `setup`; Pharos is the first
- `limits`: model -> for each round, the rows per second of each batch size
- `rows`: a list of `model`, `server`, `clients` and `rounds`, which has for each round the result of `client.py` with
  `processor_ms` (of the server, for a request) and `others` (processors in use by other processes), or only `error`
"""

import json
import statistics
import sys
from html import escape
from pathlib import Path

GOAL_MODEL, GOAL_CLIENTS, GOAL_SHARE = "encoder", (8, 32), 0.97
"""At these numbers of clients, Pharos reaches this share of the limit with this model."""
WIDTH, LEFT, BAR, RIGHT = 760, 190, 18, 150
"""Sizes of the picture in pixels: the width, the space of the names, the height of a bar with its gap, the space of the numbers."""
STYLE = """
  text { font: 13px sans-serif; fill: #24292f } .head { font-weight: bold; font-size: 15px } .group { font-style: italic }
  .page { fill: #ffffff } .bar { fill: #9aa4ae } .own { fill: #2563a8 } .range { stroke: #24292f } .limit { stroke: #b3261e }
  .limits { fill: #b3261e }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e6e6 } .page { fill: #1e2227 } .bar { fill: #6b7580 } .own { fill: #5b9bdf } .range { stroke: #e6e6e6 }
    .limit { stroke: #f2b8b5 } .limits { fill: #f2b8b5 }
  }
"""


def good(row: dict) -> list:
    """Returns the successful rounds of one row."""
    return [one for one in row["rounds"] if "error" not in one]


def number(value: float) -> str:
    """Writes a number with three significant digits."""
    if value >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    decimals = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{decimals}f}" if value >= 0.1 else f"{value:.2g}"


def number_of(clients: int) -> str:
    """Returns the number of clients in words."""
    return f"{clients} client{'s' if clients > 1 else ''}"


def case_name(model: str, clients: int) -> str:
    """Writes a case."""
    return f"{model}, {number_of(clients)}"


def spread(values: list) -> str:
    """Writes the median and the range of values."""
    if not values:
        return "-"
    return f"{number(statistics.median(values))} ({number(min(values))} to {number(max(values))})"


def shares(results: dict, row: dict) -> list:
    """Returns the requests per second of each round as a share of the limit in the same round. A request has one row."""
    limits = results["limits"][row["model"]]
    return [one["rate"] / max(limit.values()) for one, limit in zip(row["rounds"], limits) if "error" not in one]


def cases(results: dict) -> list:
    """Returns the pairs of a model and a number of clients, in the order of the report."""
    models = list(results["limits"])
    found = {(row["model"], row["clients"]) for row in results["rows"]}
    return sorted(found, key=lambda case: (models.index(case[0]), case[1]))


def rows_of(results: dict, model: str, clients: int) -> list:
    """Returns the rows of a case that have results, in the order of the servers."""
    names = [server["name"] for server in results["servers"]]
    found = [row for row in results["rows"] if (row["model"], row["clients"]) == (model, clients) and good(row)]
    return sorted(found, key=lambda row: names.index(row["server"]))


def ratios(own: dict, other: dict) -> list:
    """Returns the requests per second of one row as multiples of those of another row in the same round."""
    pairs = zip(own["rounds"], other["rounds"])
    return [one["rate"] / two["rate"] for one, two in pairs if "error" not in one and "error" not in two]


def goals(results: dict) -> list:
    """Returns a sentence for each goal, with the value that Pharos reached."""
    told = []
    for model, clients in cases(results):
        own, *others = rows_of(results, model, clients) or [None]
        if own is None or own["server"] != results["servers"][0]["name"]:
            continue
        if model == GOAL_MODEL and clients in GOAL_CLIENTS:
            reached = shares(results, own)
            verdict = "reached" if statistics.median(reached) >= GOAL_SHARE else "MISSED"
            told.append(f"{case_name(model, clients)}, at least {GOAL_SHARE} of the limit: {spread(reached)}, {verdict}")
        compared = [(ratios(own, other), other["server"]) for other in others]
        compared = [pair for pair in compared if pair[0]]
        if compared:
            least, name = min(compared, key=lambda pair: statistics.median(pair[0]))
            verdict = "reached" if statistics.median(least) > 1 else "MISSED"
            told.append(f"{case_name(model, clients)}, ahead of every peer: {spread(least)} times the fastest, {name}; {verdict}")
    return told


def table(results: dict, model: str, clients: int) -> list:
    """Returns the lines of the table of one case."""
    lines = [
        f"### {case_name(model, clients)}",
        "",
        "| server | requests/s | p50 ms | p99 ms | share of the limit | processor ms a request | processors of the client |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows_of(results, model, clients):
        columns = [spread([one[name] for one in good(row)]) for name in ("rate", "p50", "p99")]
        columns.append(spread(shares(results, row)))
        columns += [number(statistics.median(one[name] for one in good(row))) for name in ("processor_ms", "processor")]
        lines.append(f"| {row['server']} | {' | '.join(columns)} |")
    return lines


def limit_table(results: dict) -> list:
    """Returns the lines of the table of the limit."""
    sizes = sorted({size for rounds in results["limits"].values() for one in rounds for size in one}, key=int)
    lines = ["### ONNX Runtime in a loop, rows/s", "", f"| model | {' | '.join(f'batch {size}' for size in sizes)} |"]
    lines.append("|---" * (len(sizes) + 1) + "|")
    for model, rounds in results["limits"].items():
        lines.append(f"| {model} | {' | '.join(spread([one[size] for one in rounds]) for size in sizes)} |")
    return lines


def failures(results: dict) -> list:
    """Returns a sentence for each failed round."""
    failed = [(row, one["error"]) for row in results["rows"] for one in row["rounds"] if "error" in one]
    return [f"{case_name(row['model'], row['clients'])}, {row['server']}: {error.splitlines()[0]}" for row, error in failed]


def markdown(results: dict) -> str:
    """Returns the whole report as Markdown."""
    setting = results["setting"]
    lines = ["| machine | |", "|---|---|", *(f"| {name} | {text} |" for name, text in results["machine"].items()), ""]
    lines += ["| server | version | setting |", "|---|---|---|"]
    lines += [f"| {server['name']} | {server['version']} | {server['setup']} |" for server in results["servers"]]
    others = [one["others"] for row in results["rows"] for one in good(row)]
    lines += [
        "",
        f"Medians (least to largest) of {setting['rounds']} rounds of {setting['seconds']:g} s. Every server has "
        f"{setting['processes']} processes with the model and {setting['threads']} threads of ONNX Runtime in each. For encoder, "
        "servers wait up to 1 ms for more requests of a batch, and the threads spin while they wait; for digits, neither (mosec and "
        f"MLServer cannot batch without a wait: 1 ms). The client runs on the same processors. Other processes used {spread(others)} "
        "processors meanwhile.",
        "",
        *(line for case in cases(results) for line in [*table(results, *case), ""]),
        *limit_table(results),
    ]
    for title, told in (("Goals", goals(results)), ("Failures", failures(results))):
        if told:
            lines += ["", f"### {title}", "", *(f"- {line}" for line in told)]
    return "\n".join(lines) + "\n"


def picture(results: dict) -> str:
    """Returns the requests per second of all cases as an SVG."""
    parts, top = [], 10
    for model in results["limits"]:
        chosen = [case for case in cases(results) if case[0] == model]
        if chosen:
            lines, top = panel(results, chosen, top)
            parts += lines
    title = "<title>Requests per second of the servers, medians with the range of the rounds</title>"
    page = f'<rect class="page" width="{WIDTH}" height="{top}" rx="6"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}">'
    return "\n".join([head, title, f"<style>{STYLE}</style>", page, *parts, "</svg>"]) + "\n"


def panel(results: dict, chosen: list, top: int) -> tuple:
    """Draws the cases of one model from `top` down; returns the elements and the position below them."""
    model = chosen[0][0]
    rates = {case: [(row["server"], [one["rate"] for one in good(row)]) for row in rows_of(results, *case)] for case in chosen}
    most = max(max(values) for rows in rates.values() for _, values in rows)
    limit = statistics.median(max(one.values()) for one in results["limits"][model])
    drawn = limit <= 1.5 * most
    scale = (WIDTH - LEFT - RIGHT) / max(most, limit if drawn else 0)
    parts = [f'<text class="head" x="12" y="{top + 18}">{escape(model)}: requests per second</text>']
    top += 30
    first = top
    for (_, clients), rows in rates.items():
        parts.append(f'<text class="group" x="12" y="{top + 14}">{number_of(clients)}</text>')
        top += 20
        for name, values in rows:
            parts += bar(name, values, top, (scale, name == results["servers"][0]["name"]))
            top += BAR
        top += 6
    if drawn:
        at = LEFT + scale * limit
        parts.append(f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{first}" y2="{top}" stroke-dasharray="4 3"/>')
        text = f"ONNX Runtime in a loop: {number(limit)}"
        parts.append(f'<text class="limits" x="{at:.1f}" y="{first - 2}" text-anchor="end">{text}</text>')
    return parts, top + 14


def bar(name: str, values: list, top: int, form: tuple) -> list:
    """Draws one server; `form` is the scale and whether the server is Pharos."""
    scale, own = form
    middle, median = top + BAR / 2, statistics.median(values)
    low, high = (LEFT + scale * value for value in (min(values), max(values)))
    kind = "bar own" if own else "bar"
    return [
        f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>',
        f'<rect class="{kind}" x="{LEFT}" y="{top + 2}" width="{max(scale * median, 1):.1f}" height="{BAR - 4}"/>',
        f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>',
        f'<text x="{high + 6:.1f}" y="{middle + 4}">{number(median)}</text>',
    ]


def write(results: dict, to: Path):
    """Writes the results, the tables and the picture into a folder, and prints the tables."""
    to.mkdir(parents=True, exist_ok=True)
    (to / "results.json").write_text(json.dumps(results, indent=1))
    (to / "report.md").write_text(markdown(results))
    (to / "report.svg").write_text(picture(results))
    print(markdown(results), f"written to {to}", sep="\n")


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
