"""The live page at `/dashboard`: it loads in a real browser, shows the server's numbers, and logs no errors."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import threading

import pytest

from harness import browser
from harness.browser import Browser
from harness.inference import one, simple
from harness.models import copy_models
from harness.server import EXAMPLES, MODELS, ROOT, Server, binary
from harness.stream_models import COMPARED, build
from harness.waiting import DEADLINE_S, eventually, every

PAGE = ROOT / "frontend/http/src/dashboard"
needs_browser = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A server with the examples that receives valid and invalid requests for `simple` until the module ends."""
    over = threading.Event()

    def load(server):
        while not over.is_set():
            server.infer("simple", simple())
            server.ask("POST", "/v2/models/simple/infer", "{")

    with Server(tmp_path_factory.mktemp("dashboard"), [EXAMPLES]) as server:
        thread = threading.Thread(target=load, args=(server,))
        thread.start()
        yield server
        over.set()
        thread.join()


@pytest.fixture
def page(tmp_path):
    """A browser for one test."""
    with Browser(tmp_path / "profile") as opened:
        yield opened


def url(server, more="") -> str:
    return f"http://{server.metrics}/dashboard{more}"


def shows(page, identifier: str, pattern: str):
    """Waits until the text of an element matches the pattern, and returns the match."""
    text = f"document.getElementById({json.dumps(identifier)})?.innerText ?? ''"
    return eventually(f"#{identifier} fits {pattern}", lambda: (found := page.ask(text)) and re.search(pattern, found) and found)


# ---- without a browser ------------------------------------------------------------------------------------------------


def test_documents(server):
    """Each document has its content type; the policy lets the page load only its own files."""
    types = {"": "text/html", "/style.css": "text/css"} | {f"/{p.name}": "text/javascript" for p in PAGE.glob("*.js")}
    for path, kind in types.items():
        status, headers, text = fetch(server, f"/dashboard{path}")
        assert status == 200 and headers["content-type"] == f"{kind}; charset=utf-8", path
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert text.strip()
    assert fetch(server, "/dashboard/other.js")[0] == 404


def fetch(server, path: str) -> tuple:
    connection = http.client.HTTPConnection(server.metrics, timeout=DEADLINE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, {key.lower(): value for key, value in response.getheaders()}, response.read().decode()
    finally:
        connection.close()


def test_nothing_is_loaded_from_other_hosts():
    """The page refers to no other host, and its markup has no inline script or style, which the policy would block."""
    for path in PAGE.iterdir():
        addresses = re.findall(r"(?:https?:)?//[\w.]+\.\w+", re.sub(r"http://www\.w3\.org/2000/svg", "", path.read_text()))
        assert addresses == [], path.name
    markup = (PAGE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", markup)
    assert "<title>" in markup and '<html lang="en">' in markup


# ---- in a browser -------------------------------------------------------------------------------------------------------


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_appear(loaded, page, scheme):
    """The page shows rates, latencies, failures and the model's row; the console has no error."""
    page.open(url(loaded), scheme)
    shows(page, "status", "^all instances ready$")
    shows(page, "tile-rate", r"^[1-9][\d.]*( k)?/s$")
    shows(page, "tile-latency", r"^[\d.]+ (µs|ms|s)$")
    shows(page, "tile-failures", r"^[1-9][\d.]*( k)?/s$")
    shows(page, "label-failures", "^Failures, whole server$")
    assert page.ask("document.getElementById('throughput').parentElement.firstChild.textContent") == (
        "Requests per second to known models"
    )
    shows(page, "tile-instances", r"^6 of 6$")
    shows(page, "models", r"simple\s+1\s+1 of 1 ready\s+[\d.]+( k)?/s\s")
    shows(page, "failures", r"MALFORMED\s+http\s+infer\s+[1-9]")
    assert page.ask("document.getElementById('usage').hidden"), "no objectives and tenants are defined"
    lines = "[...document.querySelectorAll('#throughput path.line, #latency path.line')].filter(p => p.getAttribute('d').includes('L')).length"
    eventually("lines are drawn", lambda: page.ask(lines) >= 2)
    page.wait(3)
    assert page.complaints == []
    assert page.ask("document.title").startswith("Pharos")
    assert page.ask("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"


@needs_browser
def test_objectives_and_tenants_appear(start, page, tmp_path):
    """With their rates, only where they are defined, and only those of the chosen model."""
    file = tmp_path / "metrics.yaml"
    slos = "slos: [{name: fast, latency: {threshold: 1us, share: 90%}}, {name: up, availability: 99.9%}]"
    file.write_text(f"{(ROOT / 'metrics.yaml').read_text()}\n{slos}\ntenants: {{header: x-tenant}}\n")
    server = start(["identity_fp32"], f"--metrics-config={file}", "--metrics-mode=prometheus")
    body = json.dumps(one("FP32", [1, 1], [1]))

    def row(identifier: str, pattern: str):
        for _ in every(0.2, DEADLINE_S):
            assert server.ask("POST", "/v2/models/identity_fp32/infer", body, headers={"x-tenant": "acme"})[0] == 200
            text = page.ask(f"document.getElementById('{identifier}').innerText")
            if re.search(pattern, text):
                return
        raise AssertionError(f"{identifier}: {text}")

    page.open(url(server))
    # Every request is slower than 1 us: all are bad, which burns the budget of 10 % ten times too fast.
    row("objectives", r"fast latency\s+identity_fp32, version 1\s+90 % in 1 µs\s+0 %\s+10\s+-900 %")
    row("objectives", r"up availability\s+identity_fp32, version 1\s+99\.9 %\s+100 %\s+0\s+100 %")
    row("tenants", r"acme\s+[\d.]+/s\s+0/s\s+[\d.]+ (µs|ms|s)\s+[\d.]+ (µs|ms|s)\s+\d+")
    assert page.complaints == []


@needs_browser
def test_the_page_computes_rates_and_percentiles(loaded, page):
    """The page's rates and percentiles of two scrapes are equal to those computed here independently."""
    page.open(url(loaded))
    shows(page, "tile-rate", r"^[1-9]")
    before, after = (
        'nv_inference_request_success{model="a\\"} b",version="1"} %d\n'
        'h_bucket{le="100"} %d\nh_bucket{le="1000"} %d\nh_bucket{le="+Inf"} %d\n' % numbers
        for numbers in [(100, 1, 2, 3), (140, 1 + 10, 2 + 90, 3 + 100)]
    )
    script = f"""(() => {{
      const known = new Map(), step = new Interval(new Scrape({json.dumps(before)}, 0, known), new Scrape({json.dumps(after)}, 2000, known));
      const heat = step.histogram("h");
      return [step.rate("nv_inference_request_success"), step.now.list("nv_inference_request_success")[0].labels.model,
        heat.counts, quantile(0.5, heat), quantile(0.05, heat), quantile(0.99, heat), step.rate("missing")];
    }})()"""
    median = 100 + 900 * (50 - 10) / 80
    assert page.ask(script) == [20, 'a"} b', [10, 80, 10], median, 50, 1000, None]
    # A counter that decreased was reset: its whole value counts as the increase.
    reset = script.replace(json.dumps(after), json.dumps(after.replace("140", "30")))
    assert page.ask(reset)[0] == 15
    assert page.complaints == []


@needs_browser
def test_the_page_lists_versions_that_load(loaded, page):
    """A version in the state LOADING has its progress, if it is known, also beside the instances of a model that serves."""
    page.open(url(loaded))
    shows(page, "tile-rate", r"^[1-9]")
    scrape = "".join(f'pharos_model_state{{model="{name}",version="1",state="LOADING"}} 1\n' for name in ("known", "unknown"))
    scrape += "".join(f'pharos_model_load_progress_ratio{{model="{name}",version="1"}} 0.43\n' for name in ("known", "serves"))
    scrape += 'pharos_instances{model="serves",version="1",state="ready"} 1\n'
    script = f"""(() => {{
      const scrape = new Scrape({json.dumps(scrape)}, 0, new Map()), loading = loads(scrape);
      return [...models(scrape)].map(([key, {{ model, version }}]) => {{
        const all = model === "serves" ? 1 : null;
        return [model, instancesText({{ version, ready: all, all, loadFailed: false, load: loading.get(key) ?? null }})[0]];
      }});
    }})()"""
    shown = {"known": "43 % loaded", "unknown": "loading", "serves": "1 of 1 ready, 43 % loaded"}
    assert dict(page.ask(script)) == shown
    assert page.complaints == []


@needs_browser
def test_a_model_is_chosen_by_keyboard(loaded, page):
    """Tab focuses the model's button and Enter selects the model; the URL stores the selection; the filter and the theme work."""
    page.open(url(loaded))
    shows(page, "models", "digits")
    for _ in range(60):
        page.press("Tab")
        if page.ask("document.activeElement.innerText") == "simple":
            break
    page.press("Enter")
    shows(page, "scope-title", "^simple, version 1$")
    assert page.ask("location.hash") == "#model=simple&version=1"
    page.wait(3)
    assert page.ask("document.activeElement.innerText") == "simple", "the focus stays while rows change"
    page.open(url(loaded, "#model=digits&version=1"))
    page.ask("window.before = true; location.reload()")

    def reloaded():
        try:
            return page.ask("window.before === undefined && !!document.getElementById('filter')")
        except AssertionError:
            # May run while one page unloads and the next one loads.
            return False

    eventually("the page is loaded again", reloaded)
    shows(page, "scope-title", "^digits, version 1$")
    page.ask("(() => { const f = document.getElementById('filter'); f.value = 'DIG'; f.dispatchEvent(new Event('input')); })()")
    shows(page, "models-count", "^4 of 7$")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.ask(ground)
    page.ask("document.getElementById('theme').click(), document.getElementById('theme').click()")
    assert page.ask(ground) != light
    assert page.complaints == []


@needs_browser
def test_streams_appear(tmp_path, page):
    """While a decoupled model is loaded, the page shows its first responses, intervals, responses and lengths; not for others."""
    models = build(tmp_path / "models", {name: COMPARED[name] for name in ("repeat", "rows")})
    body = json.dumps({"IN": [1, 2, 3], "DELAY": [5, 5, 5]})
    over = threading.Event()

    def load():
        while not over.is_set():
            server.ask("POST", "/v2/models/repeat/generate_stream", body)

    with Server(tmp_path, [models]) as server:
        thread = threading.Thread(target=load)
        thread.start()
        try:
            page.open(url(server))
            shows(page, "stream-first", r"50 % [\d.]+ (µs|ms|s)")
            shows(page, "stream-between", r"99 % [\d.]+ (µs|ms|s)")
            shows(page, "stream-responses", r"responses [1-9]")
            shows(page, "stream-bytes", r"^[\d.]+ (B|KiB)/s$")
            shows(page, "stream-lengths", r"3 to 4\s+100 %")
            page.open(url(server, "#model=rows&version=1"))
            shows(page, "scope-title", "^rows, version 1$")
            assert page.ask("document.getElementById('streams').hidden")
            assert page.complaints == []
        finally:
            over.set()
            thread.join()


@needs_browser
def test_models_on_demand_appear(start, page):
    """With their loads, unloads, waits and memory, and the memory limit; other servers have none of it."""
    server = start(["identity_fp32", "fail"], "--model-control-mode=on-demand", "--model-memory-limit=1073741824", "--model-idle-unload-secs=1")
    page.open(url(server))
    shows(page, "host-levels", r"Models\s+0 B of 1 GiB")
    assert page.ask("document.getElementById('demand').hidden")
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    assert server.infer("identity_fp32", body)[0] == 200
    # Loads, those of the last 10 s, failed and refused loads, unloads, requests that found it loaded, and requests that waited.
    shows(page, "demand-models", r"identity_fp32\t1\t[01]\t0\t0\t0\t0\t0\t1\t[\d.]+ (ms|s)\t[\d.]+ [KM]iB\t–")
    shows(page, "demand-waiting", "^0 requests wait$")
    shows(page, "demand-models", r"identity_fp32\t1\t[01]\t0\t0\t1\t0\t0\t1\t[\d.]+ (ms|s)\t–\t–")
    assert page.complaints == []


@needs_browser
def test_events_appear(start, page, tmp_path):
    """Loads, unloads, restarts of instances, reloads of the definition and refusals, once each, with a mark in their lane."""
    file = tmp_path / "metrics.yaml"
    file.write_text((ROOT / "metrics.yaml").read_text())
    options = [f"--metrics-config={file}", "--metrics-mode=prometheus", "--model-control-mode=explicit"]
    server = start(["identity_fp32", "fail"], *options, "--load-model=identity_fp32", "--http-restricted-api=model-repository:key=value")
    page.open(url(server))
    shows(page, "models", "identity_fp32")
    shows(page, "events", "^No events since this page was opened")
    load = {"headers": {"key": "value"}}
    assert server.ask("POST", "/v2/repository/models/fail/load", "{}", **load)[0] == 200
    shows(page, "events", r"fail, version 1 was loaded in [\d.]+ (ms|s)")
    assert server.ask("POST", "/v2/repository/models/fail/unload", "{}", **load)[0] == 200
    shows(page, "events", "fail, version 1 is not ready any more")
    assert server.ask("POST", "/v2/repository/models/missing/load", "{}", **load)[0] != 200
    (worker,) = server.workers()
    os.kill(worker, signal.SIGKILL)
    shows(page, "events", "1 instance of identity_fp32, version 1 restarted")
    server.process.send_signal(signal.SIGHUP)
    shows(page, "events", "metrics.yaml was read again")
    for _ in range(2):
        assert server.ask("POST", "/v2/repository/models/fail/load", "{}")[0] == 403
    shows(page, "events", r"\t[12] requests failed with RESTRICTED")
    marks = page.ask("[...document.querySelectorAll('#events-lanes rect')].map(mark => mark.getAttribute('class')).sort().join()")
    assert {"mark blue", "mark amber", "mark bad", "mark grey"} <= set(marks.split(",")), marks
    page.open(url(server, "#model=fail&version=1"))
    assert page.complaints == []


@needs_browser
def test_refusals_that_continue_are_one_event(loaded, page):
    """Events are what changed between two scrapes; a restart of the server, or a new definition, makes no others."""
    page.open(url(loaded))
    lines = lambda start, restarts, refused, reloads: (
        f'process_start_time_seconds {start}\npharos_instance_restarts_total{{model="m",version="1"}} {restarts}\n'
        f'pharos_request_failures_total{{reason="QUEUE_FULL"}} {refused}\npharos_metrics_reloads_total{{result="success"}} {reloads}\n'
    )
    texts = [lines(1, 0, 0, 0), lines(1, 0, 2, 0), lines(1, 2, 5, 0), lines(1, 2, 5, 0), lines(1, 2, 6, 0), lines(2, 3, 9, 1)]
    # The refusals appear only with a new definition: nothing is known of when they happened.
    texts += ["process_start_time_seconds 2\n" + 'pharos_metrics_reloads_total{result="success"} 1\n', lines(2, 3, 9, 2)]
    script = f"""(() => {{
      const history = new History(1e9);
      {json.dumps(texts)}.forEach((text, i) => history.add(text, 2000 * i));
      return history.events.all.map((event) => [event.lane, eventText(event), event.from, event.to]);
    }})()"""
    assert page.ask(script) == [
        ["refusals", "5 requests failed with QUEUE_FULL", 2000, 4000],
        ["instances", "2 instances of m, version 1 restarted", 4000, 4000],
        ["refusals", "1 requests failed with QUEUE_FULL", 8000, 8000],
        ["server", "the server was restarted", 10000, 10000],
        ["server", "metrics.yaml was read again", 14000, 14000],
    ]
    assert page.complaints == []


@needs_browser
def test_a_clock_that_is_set_back(loaded, page):
    """Rates stay right, old scrapes are dropped, and the points stay in order."""
    page.open(url(loaded))
    text = lambda count: f'nv_inference_request_success{{model="m",version="1"}} {count}\n'
    script = f"""(() => {{
      const history = new History(60000), rates = [];
      const texts = {json.dumps([text(20 * number) for number in range(12)])};
      texts.forEach((text, i) => {{
        history.add(text, i < 6 ? 3600000 + 2000 * i : 2000 * i);
        rates.push(history.step()?.rate("nv_inference_request_success"));
      }});
      const times = history.points.get(ALL).map((point) => point.at);
      return [rates.slice(1), history.scrapes.length, times];
    }})()"""
    rates, scrapes, times = page.ask(script)
    assert rates == [10] * 11
    assert scrapes <= 7
    assert times == [2000 * number for number in range(1, 12)]
    assert page.complaints == []


@needs_browser
def test_idle_models_need_little_memory(loaded, page):
    """The points of a model keep the buckets of its histogram only while it has requests; all share their bounds."""
    page.open(url(loaded))
    bounds = ["0.1", "1", "+Inf"]
    lines = lambda model, count: "".join(
        f'pharos_request_duration_seconds_bucket{{model="{model}",version="1",le="{bound}"}} {count}\n' for bound in bounds
    )
    texts = [lines("busy", number) + lines("other", 2 * number) + lines("idle", 5) for number in range(3)]
    script = f"""(() => {{
      const history = new History(60000);
      {json.dumps(texts)}.forEach((text, i) => history.add(text, 2000 * i));
      const heats = ["busy", "other", "idle"].map((model) => history.points.get(modelKey({{ model, version: "1" }})).map((point) => point.heat));
      const shared = heats.flat().filter((heat) => heat).every((heat) => heat.bounds === history.bounds);
      return [heats.map((of) => of.map((heat) => heat && [heat.counts, heat.from])), shared];
    }})()"""
    assert page.ask(script) == [
        [[[[1, 0, 0], 0], [[1, 0, 0], 2000]], [[[2, 0, 0], 0], [[2, 0, 0], 2000]], [None, None]],
        True,
    ]
    assert page.complaints == []


@needs_browser
def test_many_models_on_demand(loaded, page):
    """Their table reads each sample a few times, however many models there are."""
    page.open(url(loaded))
    shows(page, "models", "simple")
    script = """(() => {
      state.paused = true;
      clearTimeout(state.timer);
      const reads = (count) => {
        const names = ["loads_total", "hits_total", "wait_seconds_count", "wait_seconds_sum"].map((name) => `pharos_on_demand_${name}`);
        const lines = (number) => [...names, "pharos_model_memory_bytes"].map((name) => `${name}{model="m${number}",result="success"} 1`);
        const scrape = new Scrape(Array.from({ length: count }, (_, number) => lines(number)).flat().join("\\n"), 0);
        let read = 0;
        for (const { labels } of [...scrape.samples.values()].flat()) {
          const model = labels.model;
          Object.defineProperty(labels, "model", { get: () => { read += 1; return model; } });
        }
        history_.scrapes = [scrape];
        return [demandRows().length, read / count];
      };
      return [reads(100), reads(400)];
    })()"""
    (few, reads), (many, reads_of_many) = page.ask(script)
    assert (few, many) == (100, 400)
    assert reads == reads_of_many < 50, (reads, reads_of_many)
    assert page.complaints == []


MANY = """(() => {
  state.paused = true;
  clearTimeout(state.timer);
  const samples = (i, k) => [`nv_inference_request_success{model="m${i}",version="1"} ${k * (i + 1)}`,
    `pharos_instances{model="m${i}",version="1",state="ready"} 1`].join("\\n");
  history_.scrapes = [];
  history_.points = new Map([[ALL, []]]);
  for (let k = 0; k < 4; k++) history_.add(Array.from({ length: 500 }, (_, i) => samples(i, k * k)).join("\\n"), 2000 * k);
  show();
})()"""
"""A history of 500 models."""


@needs_browser
def test_small_charts_of_many_models(loaded, page):
    """They are drawn for the rows on the screen only, and a cell is changed only if its text does."""
    page.open(url(loaded))
    shows(page, "models", "simple")
    page.ask(MANY)
    assert page.ask("document.querySelectorAll('#models tbody tr').length") == 500
    drawn = "[...document.querySelectorAll('#models path')].filter((path) => path.getAttribute('d')?.includes('L')).length"
    eventually("the charts on the screen are drawn", lambda: page.ask(drawn) >= 5)
    page.wait(0.5)
    assert page.ask("document.querySelectorAll('#models svg').length") < 3 * 50
    page.ask("$('models-scroll').scrollTop = 1e6")
    last = "document.querySelector('#models tbody tr:last-child path')?.getAttribute('d') ?? ''"
    eventually("the charts of the last row are drawn", lambda: "L" in page.ask(last))
    page.wait(0.5)
    changes, calls = page.ask("""(() => {
      const watch = new MutationObserver(() => {}), draw = sparkline;
      let calls = 0;
      window.sparkline = (...all) => { calls += 1; draw(...all); };
      watch.observe($("models").tBodies[0], { subtree: true, childList: true, characterData: true });
      show();
      return [watch.takeRecords().length, calls];
    })()""")
    assert (changes, 0 < calls < 3 * 50) == (0, True), (changes, calls)
    assert page.complaints == []


@needs_browser
def test_failed_loads_appear(start, page, tmp_path):
    """A model of which no version could be loaded, and one of which an earlier version serves, have problems."""
    folder = copy_models(tmp_path / "models", ["identity_fp32", "fail"], MODELS)
    (folder / "fail/config.pbtxt").write_text("max_batch_sise: 1")
    server = start([], "--model-control-mode=poll", "--repository-poll-secs=1", "--exit-on-error=false", repository=folder, wait=False)
    server.wait_until_ready("/v2/health/live")
    page.open(url(server))
    shows(page, "models", r"fail\s+load failed")
    shows(page, "models", r"identity_fp32\s+1\s+1 of 1 ready\s")
    shows(page, "status", "^the last load of 1 model failed$")
    shows(page, "models-count", "^2, 1 with problems$")
    top = subprocess.run([binary(), "top", "--once", server.metrics], capture_output=True, text=True, timeout=DEADLINE_S)
    assert re.search("^fail +failed ", top.stdout, re.MULTILINE) and "failed loads 1" in top.stdout, top
    (folder / "identity_fp32/config.pbtxt").write_text("max_batch_sise: 1")
    shows(page, "models", r"identity_fp32\s+1\s+1 of 1 ready, reload failed")
    shows(page, "status", "^the last load of 2 models failed$")
    for name in ("identity_fp32", "fail"):
        shutil.copy(MODELS / name / "config.pbtxt", folder / name)
    shows(page, "status", "^all instances ready$")
    assert page.complaints == []


@needs_browser
def test_an_unreachable_server_is_reported(tmp_path, page):
    """The page reports that it cannot read the metrics, and continues when the server is back."""
    models = copy_models(tmp_path / "models", ["identity_fp32"], MODELS)
    with Server(tmp_path, [models]) as server:
        page.open(url(server))
        shows(page, "status", "^all instances ready$")
        server.kill()
        shows(page, "notice", "Cannot read the server")
        shows(page, "status", "^unreachable$")
        server.launch()
        server.wait_until_ready()
        shows(page, "status", "^all instances ready$")
    assert all("ERR_CONNECTION_REFUSED" in line or "ERR_" in line for line in page.complaints), page.complaints


@needs_browser
def test_a_server_without_scraped_metrics(tmp_path, page):
    """In mode tslog the page reports the mode instead of a missing model; in a mode with scraped metrics it draws the charts."""
    models = copy_models(tmp_path / "models", ["identity_fp32"], MODELS)
    definition = tmp_path / "metrics.yaml"
    shipped = (ROOT / "metrics.yaml").read_text()
    definition.write_text(re.sub("^mode: .*$", "mode: tslog", shipped, flags=re.MULTILINE))
    with Server(tmp_path, [models], [f"--metrics-config={definition}"]) as server:
        page.open(url(server))
        shows(page, "notice", "No metrics to show.*metrics mode is tslog.*mode both or prometheus")
        shows(page, "status", "^no metrics$")
        assert "No model is loaded" not in page.ask("document.body.innerText")
        assert page.ask("document.querySelector('main').offsetHeight") == 0
        definition.write_text(shipped)
        server.process.send_signal(signal.SIGHUP)
        shows(page, "models", r"identity_fp32\s+1\s+1 of 1 ready")
        assert page.ask("document.getElementById('notice').hidden")
        assert page.complaints == []


@needs_browser
def test_fifty_models(tmp_path, page):
    """The table has a row for each of 50 models, and updating the page stays fast."""
    server_folder = tmp_path / "server"
    server_folder.mkdir()
    source = MODELS / "identity_fp32"
    for i in range(50):
        target = server_folder / f"models/identity_{i}"
        (target / "1").mkdir(parents=True)
        config = (source / "config.pbtxt").read_text().replace('"identity_fp32"', f'"identity_{i}"')
        (target / "config.pbtxt").write_text(config)
    with Server(server_folder, [server_folder / "models"]) as server:
        page.open(url(server))
        shows(page, "models-count", "^50$")
        shows(page, "tile-instances", r"^50 of 50$")
        assert page.ask("document.querySelectorAll('#models tbody tr').length") == 50
        shows(page, "models", r"identity_9\s+1\s+1 of 1 ready")
        taken = page.ask("(() => { const t = performance.now(); show(); return performance.now() - t; })()")
        assert taken < 500, f"drawing took {taken:.0f} ms"
        assert page.complaints == []
