"""An HTTP server in threads of the test's process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def posted_to(
    answer: Callable[[BaseHTTPRequestHandler, bytes], None], *, version: str = "HTTP/1.0"
) -> Iterator[str]:
    """Serve on a free port, where every POST is answered with what was sent; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = version

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            with suppress(BrokenPipeError, ConnectionResetError):  # the other side has given up
                answer(self, sent)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    serving = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        serving.join()
