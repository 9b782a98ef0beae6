"""A real Redis from the PATH (Debian: `apt-get install redis-server`), and a listener that gives wrong answers or none."""

import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

from harness.ports import free_ports
from harness.waiting import DEADLINE_S, eventually


def missing() -> str:
    """Returns why Redis cannot be used; empty if it can."""
    return "" if shutil.which("redis-server") else "redis-server is not installed: apt-get install redis-server"


class Redis:
    """A Redis on a free port, without files on disk. Use it with `with`. `login` has the commands before each command of [`ask`]."""

    def __init__(self, folder: Path, port: int = 0, options=(), login=()):
        self.port = port or free_ports(1)[0]
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.command = [*command, "--dir", str(folder), *options]
        self.login, self.process = login, None

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually("Redis answers", self.answers)
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def answers(self) -> bool:
        try:
            return self.ask("PING")[:1] in (b"+", b"-")
        except OSError:
            return False

    def ask(self, *words) -> bytes:
        """Sends one command and returns the answer, which must be short."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S) as connection:
            for command in (*self.login, words):
                command = [word if isinstance(word, bytes) else str(word).encode() for word in command]
                parts = [b"*%d\r\n" % len(command), *(b"$%d\r\n%s\r\n" % (len(word), word) for word in command)]
                connection.sendall(b"".join(parts))
                answer = connection.recv(1 << 20)
            return answer

    def keys(self) -> list:
        """Returns the names of all keys."""
        return self.ask("KEYS", "*").split(b"\r\n")[2::2]

    def pause(self):
        """Stops the process: it keeps its connections and sends no more answers."""
        self.process.send_signal(signal.SIGSTOP)


class NoRedis:
    """Listens and answers each chunk that it reads with `answer`; None sends no answer. Use it with `with`."""

    def __init__(self, answer):
        self.answer, self.connections, self.open = answer, 0, []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]

    def __enter__(self):
        threading.Thread(target=self.accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.socket.close()
        for connection in self.open:
            connection.close()

    def accept(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            self.open.append(connection)
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        try:
            while piece := connection.recv(1 << 16):
                answer = self.answer(piece) if callable(self.answer) else self.answer
                if answer is not None:
                    connection.sendall(answer)
        except OSError:
            pass
