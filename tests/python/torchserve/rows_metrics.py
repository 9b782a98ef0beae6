"""Rows of `table.py`: the metric calls that handlers make, and the content of a scrape."""

from torchserve.row_types import JSON, Rest, calls, one

DIMENSIONS = [{"dim": ["Kind", "a"]}]

METRICS = [
    one(
        "metrics: counter",
        calls(["add_counter", ["C1", 1]], ["add_counter", ["C1", 2.5]], ["add_counter", ["C1", 0]]),
        logs=True,
    ),
    one("metrics: counter with dimensions", calls(["add_counter", ["C2", 1], {"dimensions": DIMENSIONS}]), logs=True),
    one(
        "metrics: counter with an index", calls(["add_counter", ["C3", 1, 0]], ["add_counter", ["C3", 1, 7]]), logs=True
    ),
    one("metrics: counter falls", calls(["add_counter", ["C4", -1]])),
    one(
        "metrics: time",
        calls(["add_time", ["T1", 5.5]], ["add_time", ["T1", 5, None, "s"]], ["add_time", ["T2", 1, 0, "s"]]),
        logs=True,
    ),
    one("metrics: time in an unknown unit", calls(["add_time", ["T3", 1, None, "h"]])),
    one("metrics: time as histogram", calls(["add_time", ["T4", 1], {"metric_type": "$HISTOGRAM"}]), logs=True),
    one(
        "metrics: size",
        *(calls(["add_size", [f"S{unit}", 3.25, None, unit]]) for unit in ("MB", "kB", "GB", "B")),
        logs=True,
    ),
    one("metrics: size in an unknown unit", calls(["add_size", ["S5", 1, None, "TB"]])),
    one(
        "metrics: percent", calls(["add_percent", ["P1", 12.5]], ["add_percent", ["P1", 50, 0, DIMENSIONS]]), logs=True
    ),
    one("metrics: error", calls(["add_error", ["E1", 1]], ["add_error", ["E2", 1, DIMENSIONS]]), logs=True),
    one(
        "metrics: any",
        calls(
            ["add_metric", ["M1", 1, "tokens"]],
            ["add_metric", ["M2", 2, "count", None, DIMENSIONS, "$GAUGE"]],
            ["add_metric", ["M3", 3, ""]],
        ),
        logs=True,
    ),
    one(
        "metrics: numbers",
        *(
            calls(["add_metric", [f"N{place}", value, "count", None, [], "$GAUGE"]])
            for place, value in enumerate(
                (10000000, 12345678.9, 0.00001234, 0.001, 1e-3, 123456, -2, 0.1, 1e15, 4294967296)
            )
        ),
        logs=True,
    ),
    one(
        "metrics: numbers that were lost",
        calls(
            ["add_metric", ["Lost1", "$NAN", "count", None, [], "$GAUGE"]],
            ["add_metric", ["Lost2", "$INF", "count", None, [], "$GAUGE"]],
            ["add_metric", ["Lost3", 1e16, "count", None, [], "$GAUGE"]],
        ),
        logs=True,
    ),
    one(
        "metrics: dimensions that were lost",
        calls(["add_metric", ["Lost4", 1, "count", None, [{"dim": ["Host", "http://a:80"]}], "$GAUGE"]]),
        logs=True,
    ),
    one(
        "metrics: a comma in a dimension",
        calls(["add_metric", ["Lost6", 1, "count", None, [{"dim": ["Host", "a,b"]}], "$GAUGE"]]),
        logs=True,
    ),
    one("metrics: unit that was lost", calls(["add_metric", ["Lost5", 1, "tokens/s", None, [], "$GAUGE"]]), logs=True),
    one(
        "metrics: in the cache",
        calls(
            ["add_metric_to_cache", ["K1", "count", ["ModelName", "Kind"]]],
            ["get_and_update", ["K1", "$COUNTER", 2, ["metered", "x"]]],
            ["get_metric", ["K1", "$GAUGE"]],
            ["get_metric", ["nothing"]],
            ["get_metric", ["K1"]],
        ),
        logs=True,
    ),
    one(
        "metrics: in the cache, with ids",
        calls(["kept", [5, ["metered", "x"]]], ["kept_with_ids", [6, ["metered", "y"]]]),
        logs=True,
    ),
    one("metrics: wrong number of values", calls(["kept", [5, ["metered"]]], ["kept", [5]])),
    one(
        "metrics: wrong types",
        calls(
            ["add_metric_to_cache", [5, "count"]],
            ["add_metric_to_cache", ["W", 5]],
            ["add_metric_to_cache", ["W", "count", "ModelName"]],
            ["add_metric_to_cache", ["W", "count", [], "gauge"]],
            ["add_counter", ["W", "one"]],
        ),
    ),
    one(
        "metrics: update of old",
        calls(
            ["add_metric_to_cache", ["U1", "count", ["ModelName"], "$GAUGE"]],
            ["update", ["U1", "$GAUGE", 4], {"dimensions": DIMENSIONS}],
        ),
        logs=True,
    ),
    one(
        "metrics: store of old",
        calls(
            [
                "store",
                [
                    ["add_counter", "O1", 1],
                    ["add_time", "O2", 2],
                    ["add_size", "O3", 3],
                    ["add_percent", "O4", 4],
                    ["add_error", "O5", "bad"],
                    ["add_metric", "O6", 6, "count"],
                ],
            ]
        ),
        logs=True,
    ),
    one("metrics: at the start", calls(), logs=True),
    one(
        "metrics: printed",
        calls(
            ["print", ["[METRICS]Printed.Count:3|#Kind:a|#type:COUNTER|#hostname:h,1700000000"]],
            ["log", ["[METRICS]Logged.Count:4|#Kind:a|#type:GAUGE|#hostname:h,1700000000,some-id"]],
            ["print", ["[METRICS]nonsense"]],
        ),
        logs=True,
    ),
    one("metrics: ts names", calls(["add_counter", ["Requests2XX", 1]]), logs=True),
]

NO_DIMENSIONS = [
    one(
        "metrics: dimensions None",
        calls(["add_counter", ["D1", 1], {"dimensions": None}], ["add_time", ["D2", 1], {"dimensions": None}]),
    )
]

SHOWN = ("PC", "PG", "PH", "KeptGauge", "StartTime", "ts_inference_requests_total", "Requests2XX", "Requests4XX")

PROMETHEUS = [
    one("scrape: at the start", Rest("/ping"), setup="prometheus", scrape=SHOWN),
    one(
        "scrape: models' own",
        calls(
            ["add_counter", ["PC", 1], {"dimensions": DIMENSIONS}],
            ["add_counter", ["PC", 2.5], {"dimensions": DIMENSIONS}],
            ["add_metric", ["PG", 7, "count", None, [], "$GAUGE"]],
            ["add_metric", ["PG", 8, "count", None, [], "$GAUGE"]],
            ["add_metric", ["PH", 0.3, "count", None, [], "$HISTOGRAM"]],
        ),
        setup="prometheus",
        scrape=SHOWN,
    ),
    one(
        "scrape: versions",
        Rest("/predictions/echo", b"x"),
        Rest("/predictions/echo/1.0", b"x"),
        Rest("/predictions/absent", b"x"),
        setup="prometheus",
        scrape=SHOWN,
    ),
    one(
        "scrape: names",
        *(
            Rest(f"/metrics?{query}", at="metrics")
            for query in (
                "name[]=StartTime",
                "name%5B%5D=PC&name%5B%5D=PG",
                "name[]=PH",
                "name[]=PH_sum",
                "name[]=absent",
            )
        ),
        setup="prometheus",
    ),
    one(
        "scrape: paths",
        Rest("/", at="metrics"),
        Rest("/unknown", at="metrics"),
        Rest("/metrics/more?name[]=absent", at="metrics"),
        Rest("/metrics?name[]=absent", b"", at="metrics"),
        setup="prometheus",
    ),
    one(
        "scrape: legacy",
        Rest("/predictions/metered", "[]", JSON),
        calls(["add_counter", ["LC", 1]]),
        setup="legacy",
        scrape=("",),
        logs=True,
    ),
    one("scrape: mode log", Rest("/metrics", at="metrics")),
    one(
        "not detected",
        calls(["add_counter", ["Undeclared", 1]], ["add_time", ["HandlerTime", 3.5]]),
        setup="strict",
        logs=True,
    ),
]
