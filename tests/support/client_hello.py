"""How real TLS clients begin."""

import ssl


def client_hello(server_name: str | None) -> bytes:
    """Return the first bytes of Python's TLS client that asks for a server by name; None: it names none."""
    context = ssl.create_default_context()
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=server_name)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake without a server")
