"""The script that takes the book's pictures, with a stand-in for Grafana, which no package registry has.

The stand-in accepts what Grafana needs (its documentation is linked in `harness/grafana.py`): the provisioning of the repository with
an expanded path, a data source that answers, and a dashboard by its `uid`. Whether Grafana itself draws the panels is not seen here.
"""

import os
import sys

import pytest

from documents.pictures import dashboard, pixels_of
from harness import browser, grafana, prometheus
from harness.models import copy_models
from harness.server import Server
from harness.waiting import eventually

STANDIN = '''#!{python}
"""Serves a page for a dashboard with the values of its data source."""
import glob, http.server, json, os, re, sys, urllib.parse, urllib.request

assert sys.argv[1] == "server" and sys.argv[2].startswith("--homepath=")
provisioning = os.environ["GF_PATHS_PROVISIONING"]
(source,) = re.findall("url: (.*)", open(glob.glob(provisioning + "/datasources/*.yaml")[0]).read())
(path,) = re.findall("path: (.*)", open(glob.glob(provisioning + "/dashboards/*.yaml")[0]).read())
boards = [json.load(open(file)) for file in glob.glob(os.path.expandvars(path) + "/*.json")]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        place, _, query = self.path.partition("?")
        body = "ok"
        if place.startswith("/d/"):
            (board,) = [board for board in boards if "/d/" + board["uid"] == place]
            assert urllib.parse.parse_qs(query)["from"] == ["now-60s"], query
            asked = urllib.parse.urlencode({{"query": "count(nv_inference_count)"}})
            answer = json.load(urllib.request.urlopen(source + "/api/v1/query?" + asked))
            (value,) = [sample["value"][1] for sample in answer["data"]["result"]]
            titles = [panel["title"] for panel in board["panels"] if panel["type"] != "row"]
            panels = "".join('<p>%s<svg width=400 height=20><rect width=400 height=20 fill=green /></svg>' % title for title in titles)
            body = "<h1>%s</h1><b>%s models</b>%s" % (board["title"], value, panels)
            print("shown", board["title"], value, flush=True)
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(body.encode())


http.server.ThreadingHTTPServer((os.environ["GF_SERVER_HTTP_ADDR"], int(os.environ["GF_SERVER_HTTP_PORT"])), Handler).serve_forever()
'''


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
@pytest.mark.skipif(bool(prometheus.missing()), reason=prometheus.missing())
def test_a_picture_of_a_dashboard(tmp_path, monkeypatch):
    """The page has the dashboard's title and the number of models that Prometheus has scraped, and is in the picture."""
    program = tmp_path / "grafana-standin"
    program.write_text(STANDIN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PHAROS_GRAFANA", str(program))
    picture = tmp_path / "picture.png"
    models = copy_models(tmp_path / "models", ["identity_fp32", "fail"])
    with Server(tmp_path, [models]) as server, prometheus.Prometheus(tmp_path, server.metrics) as scraping:
        eventually("Prometheus has scraped the server", scraping.ready)
        eventually("the models are scraped", lambda: scraping.query("count(nv_inference_count)"))
        dashboard(tmp_path, scraping.address, 1, picture)
    assert "shown Pharos / Server overview 2" in (tmp_path / "grafana.log").read_text()
    pixels = pixels_of(picture.read_bytes())
    assert pixels.shape == (1000, 1400, 3)
    green = (pixels == (0, 128, 0)).all(axis=2).sum()
    assert green > 4 * 400 * 20, "the panels are not drawn"


def test_a_missing_grafana_is_named(monkeypatch):
    """The script prints this instead of a picture."""
    monkeypatch.setenv("PHAROS_GRAFANA", os.devnull)
    assert grafana.missing() == (
        "no grafana on the PATH, and PHAROS_GRAFANA names none (https://grafana.com/grafana/download)"
    )
