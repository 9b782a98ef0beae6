"""Scrapers that do not read their answers: the server's memory stays bounded, and other scrapers get theirs."""

import contextlib

from harness.inference import simple
from harness.scrapers import CONNECTIONS, REQUESTS, scraper
from harness.server import EXAMPLES, Server, total
from harness.waiting import eventually


def test_unread_scrapes_take_little_memory(tmp_path):
    with Server(tmp_path, [EXAMPLES]) as server, contextlib.ExitStack() as open_:
        server.scrape()
        before = server.resident_bytes()
        for _ in range(CONNECTIONS):
            open_.enter_context(scraper(server))
        peak = before
        for _ in range(1000):
            peak = max(peak, server.resident_bytes())
            assert server.infer("simple", simple())[0] == 200
        grown = (peak - before) >> 20
        assert grown < 200, f"{CONNECTIONS} connections with {REQUESTS} unread scrapes take {grown} MiB"
        assert server.get("/v2/health/ready")[0] == 200


def test_a_shared_scrape_shows_what_was_before_its_request(tmp_path):
    """Scrapes that wait share one rendering, which begins after their requests."""
    with Server(tmp_path, [EXAMPLES]) as server, contextlib.ExitStack() as open_:
        for _ in range(20):
            open_.enter_context(scraper(server))
        for count in range(1, 30):
            assert server.infer("simple", simple())[0] == 200
            assert total(server.scrape(), "nv_inference_request_success", model="simple") == count


def test_a_scraper_that_does_not_read_is_closed(tmp_path):
    """After 30 s, although other clients have 300 s by default."""
    with Server(tmp_path, [EXAMPLES]) as server:
        with scraper(server):
            refused = lambda: total(server.scrape(), "pharos_connections_refused_total", listener="metrics", reason="SLOW_READER")
            eventually("the connection is refused", lambda: refused() == 1)
