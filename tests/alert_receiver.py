"""What receives alerts in tests: a real HTTP server on this machine, and the file that W&B leaves offline."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tracked import wandb_records

VALUES = [0.02] * 40 + [0.02 * 1.6**k for k in range(20)]
SECRET = "hunter2SECRET"  # noqa: S105 - a password that is no password


class Receiver:
    """Keeps the JSON of every POST; answers with `status`."""

    def __init__(self, port, status=200):
        self.port, self.status = port, status
        self.posts, self.paths = [], []

    @property
    def url(self):
        """As apprise takes it, with what nobody may see."""
        return f"json://user:{SECRET}@127.0.0.1:{self.port}/{SECRET}/"

    @property
    def titles(self):
        return [post["title"] for post in self.posts]


@contextmanager
def receiver(status=200):
    """Serve on a free port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            kept.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            kept.paths.append(self.path)
            self.send_response(kept.status)
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept = Receiver(server.server_port, status)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield kept
        server.shutdown()


@contextmanager
def dripping():
    """Serve a byte every half second and never an end: no timeout of a socket ever comes."""
    stop = threading.Event()

    def drip(connection):
        with connection:
            try:
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                while not stop.wait(0.5):
                    connection.sendall(b"x")
            except OSError:
                pass

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield Receiver(server.getsockname()[1])
        stop.set()


def run(guard, values=VALUES, start=1):
    """Observe until the guard decides; return the decision."""
    for step, value in enumerate(values[start - 1 :], start=start):
        decision = guard.observe(step=step, kl_mean=value)
        if decision:
            break
    return decision


def wandb_alerts(folder):
    """Return the alerts in the file of the offline run below a folder, once W&B has written it."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.finish()
    wandb.teardown()  # waits for its process, which may still be writing
    (path,) = folder.rglob("run-*.wandb")
    records = [Record.FromString(data) for data in wandb_records(path.read_bytes())]
    return [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
