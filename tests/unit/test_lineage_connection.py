"""A server that is not there, or not MLflow: an error in seconds that says what to do. Only sockets, no MLflow."""

import http.server
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from infra.lineage import Lineage, LineageError

pytestmark = pytest.mark.unit


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Accepts connections, never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def web_page_port() -> Iterator[int]:
    """Answers every path with a page, as a single-page application's server does."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html></html>")

        def log_message(self, *_args: object) -> None:
            """Nothing on stderr."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_closed_port_names_the_address_and_the_command_that_starts_the_stack() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    started = time.monotonic()
    with pytest.raises(LineageError, match=rf"{url}.*eagle3 up"):
        Lineage(url)
    assert time.monotonic() - started < 10


def test_a_server_that_never_answers_is_given_up_within_ten_seconds(silent_port: int) -> None:
    started = time.monotonic()
    with pytest.raises(LineageError, match=rf"http://127.0.0.1:{silent_port}.*eagle3 up"):
        Lineage(f"http://127.0.0.1:{silent_port}")
    assert time.monotonic() - started < 10


def test_another_server_on_the_port_is_not_taken_for_mlflow(web_page_port: int) -> None:
    with pytest.raises(LineageError, match=r"something answers .* but not as MLflow does"):
        Lineage(f"http://127.0.0.1:{web_page_port}")


def test_credentials_in_the_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(LineageError, match="MLFLOW_TRACKING_PASSWORD") as error:
        Lineage("http://user:hunter2@127.0.0.1:5000")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "file:///mlruns", "http://", "mlruns", ""])
def test_what_is_no_server_is_refused(uri: str) -> None:
    with pytest.raises(LineageError, match="expected the URL of an MLflow server"):
        Lineage(uri)
