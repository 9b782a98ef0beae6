"""Scrapers that do not read their answers."""

import socket

from harness.server import Server

CONNECTIONS, REQUESTS = 200, 50
"""The connections of the attack, and the pipelined requests of each."""
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


def scraper(server: Server) -> socket.socket:
    """Returns a connection with a small window that has requested the metrics `REQUESTS` times."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.metrics_port))
    connection.sendall(SCRAPE * REQUESTS)
    return connection
