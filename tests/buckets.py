"""A bucket for tests: moto's S3 on the loopback, behind a proxy that counts and spoils answers."""

import contextlib
import http.client
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

# Neither may appear in anything that a run writes.
KEY = "AKIATESTTESTTESTTEST"
SECRET = "wJalrXUtnFEMIbPxRfiCYTESTTESTTESTTESTKEY"

# What the proxy does to a request, given its method and path: nothing, or one of the faults.
# 500, 503, expired, denied: the answer of S3 to such a request. reset: the connection ends without
# an answer. lost: the same, after the request was passed on. truncated: half of the body. flipped:
# the body with another byte in its middle.
Fault = Callable[[str, str], str]
_REFUSALS = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "expired": (400, "ExpiredToken"),
    "denied": (403, "AccessDenied"),
}


@dataclass
class Proxy:
    """What a proxy has passed on, and what it does to requests.

    Attributes:
        endpoint: its address.
        fault: chooses what happens to a request.
        delay: seconds before each answer.
        requests: method, path and bytes of the body of each answer to the client.
    """

    endpoint: str = ""
    fault: Fault = lambda method, path: ""
    delay: float = 0.0
    requests: list[tuple[str, str, int]] = field(default_factory=list)

    def bytes_of(self, part: str = "", method: str = "GET") -> int:
        """Return the bytes that were sent for paths that contain a part."""
        return sum(size for verb, path, size in self.requests if verb == method and part in path)


def _handler(proxy: Proxy, behind: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            del self.headers["Transfer-Encoding"]
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(chunks)

        def _pass_on(self) -> None:
            body = self._body()
            time.sleep(proxy.delay)
            fault = proxy.fault(self.command, self.path)
            if fault == "reset":
                self.close_connection = True
                self.connection.close()
                return
            if fault in _REFUSALS:
                status, code = _REFUSALS[fault]
                content = f"<Error><Code>{code}</Code><Message>a planted fault</Message></Error>"
                headers = {"Content-Type": "application/xml"}
                answer = content.encode()
            else:
                # urllib would add a type of content, which moto takes for a form.
                connection = http.client.HTTPConnection(behind, timeout=60)
                with contextlib.closing(connection):
                    del self.headers["Expect"]
                    connection.request(self.command, self.path, body, dict(self.headers))
                    response = connection.getresponse()
                    status, headers, answer = response.status, response.headers, response.read()
            if fault == "lost":
                self.close_connection = True
                return
            if fault == "flipped" and answer:
                middle = len(answer) // 2
                answer = answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]

            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = headers.get("Content-Length") if self.command == "HEAD" else len(answer)
            self.send_header("Content-Length", str(length or 0))
            self.end_headers()
            if self.command == "HEAD":
                answer = b""
            if fault == "truncated":
                self.close_connection = True
                answer = answer[: len(answer) // 2]
            with contextlib.suppress(ConnectionError):
                self.wfile.write(answer)
            proxy.requests.append((self.command, self.path, len(answer)))

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

    return Handler


@contextlib.contextmanager
def bucket_server() -> Iterator[Proxy]:
    """Start moto's S3 with a bucket ``bucket`` behind a proxy, and set the environment for it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    behind = f"{host}:{port}"
    proxy = Proxy()
    front = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy, behind))
    proxy.endpoint = f"http://127.0.0.1:{front.server_address[1]}"
    threading.Thread(target=front.serve_forever, daemon=True).start()
    variables = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": proxy.endpoint,
    }
    try:
        with mock.patch.dict(os.environ, variables):
            for method, path in (("POST", "/moto-api/reset"), ("PUT", "/bucket")):
                connection = http.client.HTTPConnection(behind)
                with contextlib.closing(connection):
                    connection.request(method, path)
                    assert connection.getresponse().status == 200
            yield proxy
    finally:
        front.shutdown()
        front.server_close()
        server.stop()
