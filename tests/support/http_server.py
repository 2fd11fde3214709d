"""An HTTP server in threads of the test's process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]
"""Takes a request and its body."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """Connections that wait to be accepted; with the library's 5 the kernel may reset some of a burst."""


def posted_to(answer: Answer, *, version: str = "HTTP/1.0") -> AbstractContextManager[str]:
    """Serve on a free port, where every POST is answered with what was sent; yield the address."""
    return served("POST", answer, version=version)


@contextmanager
def served(methods: str, answer: Answer, *, version: str = "HTTP/1.0") -> Iterator[str]:
    """Serve on a free port, where every request of these methods is answered; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = version

        def answer_it(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            with suppress(BrokenPipeError, ConnectionResetError):  # the other side has given up
                answer(self, sent)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    for method in methods.split():
        setattr(Handler, f"do_{method}", Handler.answer_it)
    http = _Server(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        serving.join()
