"""Storage against moto's S3 and small web servers: faults, refusals, races, and no secrets."""

import concurrent.futures
import contextlib
import http.server
import importlib.util
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from llmtrain import storage
from llmtrain.errors import UserError
from llmtrain.storage import Storage, StorageError, is_address
from tests.buckets import KEY, SECRET, Proxy, bucket_server

pytest.importorskip("s3fs")
pytest.importorskip("moto")

CONTENT = bytes(range(256)) * 8
TRANSIENT = ["500", "503", "reset", "truncated", "flipped"]
CHANGES = ["write", "upload", "create"]
READS = ["read", "part", "download", "sizes"]


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with bucket_server() as proxy:
        yield proxy


@pytest.fixture
def proxy(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(storage, "PATIENCE", 5.0)
    monkeypatch.setattr(storage, "_FIRST_PAUSE", 0.05)
    yield server
    server.fault = lambda method, path: ""
    server.delay = 0.0
    server.requests.clear()


@pytest.fixture(scope="module")
def shared_bucket(server: Proxy) -> Storage:
    return Storage("s3://bucket/folder", writable=True)


@pytest.fixture
def bucket(proxy: Proxy, shared_bucket: Storage) -> Storage:
    """A folder with one file."""
    shared_bucket.delete(shared_bucket.sizes())
    shared_bucket.write("file", CONTENT)
    proxy.requests.clear()
    return shared_bucket


def upload(folder: Storage, local: Path) -> None:
    (local / "source").write_bytes(CONTENT)
    folder.upload("new", local / "source")


def download(folder: Storage, local: Path) -> bytes:
    folder.download("file", local / "here")
    return (local / "here").read_bytes()


ACTIONS: dict[str, Callable[[Storage, Path], object]] = {
    "read": lambda folder, _: folder.read("file", is_intact=CONTENT.__eq__),
    "part": lambda folder, _: folder.read("file", 16, 512, is_intact=CONTENT[16:512].__eq__),
    "download": download,
    "sizes": lambda folder, _: folder.sizes(),
    "write": lambda folder, _: folder.write("new", CONTENT),
    "upload": upload,
    "create": lambda folder, _: folder.create("new", CONTENT),
    "delete": lambda folder, _: folder.delete(["file"]),
}
RESULTS = {
    "read": CONTENT,
    "part": CONTENT[16:512],
    "download": CONTENT,
    "sizes": {"file": len(CONTENT)},
    "create": True,
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("fault", TRANSIENT)
def test_passing_fault_leaves_the_result_right(
    bucket: Storage, proxy: Proxy, fault: str, action: str, tmp_path: Path
) -> None:
    # TLS notices another byte in a listing, and only contents have hashes.
    if fault == "flipped" and action in ("sizes", "create"):
        pytest.skip("an answer in XML")
    faults = iter([fault] * 3)
    proxy.fault = lambda method, path: next(faults, "")

    assert ACTIONS[action](bucket, tmp_path) == RESULTS.get(action)

    proxy.fault = lambda method, path: ""
    if action in CHANGES:
        assert bucket.read("new") == CONTENT
    assert ("file" in bucket.sizes()) == (action != "delete")


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("fault", ["503", "reset", "truncated"])
def test_lasting_fault_ends_with_one_line(
    bucket: Storage,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    action: str,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(storage, "PATIENCE", 0.0)
    if fault == "truncated" and action not in READS:
        pytest.skip("the answer has no body")
    requests = itertools.count()
    proxy.fault = lambda method, path: (next(requests), fault)[1]

    with pytest.raises(StorageError, match=f"{bucket}.*does not answer") as error:
        ACTIONS[action](bucket, tmp_path)

    assert "\n" not in str(error.value)
    # The libraries repeat a request themselves, and each may wait for seconds.
    assert next(requests) <= 8
    assert not [*tmp_path.glob("*here*")]


@pytest.mark.parametrize("action", ["part", "upload"])
def test_long_action_is_repeated_too(
    bucket: Storage, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, action: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(storage, "PATIENCE", 0.2)
    proxy.delay = 0.4
    faults = iter(["500"])
    proxy.fault = lambda method, path: next(faults, "")

    assert ACTIONS[action](bucket, tmp_path) == RESULTS.get(action)


@pytest.mark.parametrize("fault", ["expired", "denied"])
@pytest.mark.parametrize("action", ACTIONS)
def test_refusal_ends_at_once(
    bucket: Storage, proxy: Proxy, fault: str, action: str, tmp_path: Path
) -> None:
    requests = itertools.count()
    proxy.fault = lambda method, path: (next(requests), fault)[1]

    with pytest.raises(StorageError, match=f"{bucket}.*refuses.*log in"):
        ACTIONS[action](bucket, tmp_path)

    assert next(requests) <= 2


@pytest.mark.parametrize("action", CHANGES)
@pytest.mark.parametrize("name", ["no-such-bucket", "No_Bucket!"])
def test_bucket_that_does_not_exist_is_an_error_at_once(
    proxy: Proxy, name: str, action: str, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match=r"refuses.*check the name|there is no such bucket"):
        ACTIONS[action](Storage(f"s3://{name}/set", writable=True), tmp_path)


@pytest.mark.parametrize(
    "variables", [{"AWS_PROFILE": "absent"}, {"AWS_SECRET_ACCESS_KEY": None}], ids=str
)
def test_missing_login_is_an_error_at_once(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None]
) -> None:
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    with pytest.raises(StorageError, match="refuses"):
        Storage("s3://bucket/set").read("file")


def test_absent_files(bucket: Storage, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        bucket.read("absent")
    with pytest.raises(FileNotFoundError):
        bucket.read("absent", start=0, stop=4)
    with pytest.raises(FileNotFoundError):
        bucket.download("absent", tmp_path / "here")
    with pytest.raises(FileNotFoundError):
        bucket.upload("new", tmp_path / "absent")
    bucket.delete(["absent", "file"])

    assert bucket.sizes() == {}
    assert bucket.sizes("absent/folder") == {}
    assert [*tmp_path.iterdir()] == []


def test_upload_in_parts_survives_faults(bucket: Storage, proxy: Proxy, tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        for part in range(101):  # from 100 MiB on, s3fs divides a file
            file.write(bytes([part]) * (1 << 20))
    faults = iter(["", "503", "", "reset", "503", "", "reset"])
    proxy.fault = lambda method, path: next(faults, "")

    bucket.upload("large", path)

    assert next(faults, None) is None
    assert any("partNumber" in request for _, request, _ in proxy.requests)
    bucket.download("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


# Creating, and two writers


def create(address: str, content: bytes) -> bool:
    return Storage(address, writable=True).create("claim", content)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_one_of_several_callers_creates_a_file(bucket: Storage, kind: str) -> None:
    contents = [f"caller {number}".encode() for number in range(4)]
    pool = (
        concurrent.futures.ThreadPoolExecutor(4)
        if kind == "threads"
        else concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
    )
    with pool:
        created = [*pool.map(create, [bucket.address] * 4, contents)]

    assert created.count(True) == 1
    assert bucket.read("claim") == contents[created.index(True)]
    assert bucket.create("claim", b"another") is False
    assert bucket.create("claim", contents[created.index(True)]) is True


def test_creation_whose_answer_is_lost(bucket: Storage, proxy: Proxy) -> None:
    lost = iter(["lost"])
    proxy.fault = lambda method, path: next(lost, "") if method == "PUT" else ""

    assert bucket.create("claim", b"this run") is True
    assert next(lost, None) is None


def write_as_another(address: str) -> None:
    folder = Storage(address, writable=True)
    folder.write("file", CONTENT + CONTENT)
    folder.write("folder/new", b"")


def test_what_another_process_writes_is_seen_at_once(bucket: Storage) -> None:
    assert [*bucket.sizes()] == ["file"]
    assert bucket.read("file") == CONTENT

    process = multiprocessing.get_context("spawn").Process(
        target=write_as_another, args=(bucket.address,)
    )
    process.start()
    process.join()

    assert bucket.read("file") == CONTENT + CONTENT
    assert bucket.sizes() == {"file": 2 * len(CONTENT), "folder/new": 0}
    assert bucket.sizes("folder") == {"folder/new": 0}


# Addresses


@pytest.mark.parametrize(
    "address",
    [
        "https://user:hunter2@example.org/set",
        "https://hunter2@example.org/set",
        "s3://AKIA:hun/hunter2@bucket/set",
        "s3://AKIA:hunter2/set",
        "s3://bucket/set?X-Amz-Signature=hunter2",
        "https://example.org/set#hunter2",
        "ftp://user:hunter2@example.org/set",
    ],
)
def test_secrets_in_addresses_are_refused(address: str) -> None:
    with pytest.raises(
        UserError, match=r"^--dataset \w+://\*\*\* has a password or a query"
    ) as error:
        Storage(address, source="--dataset ")

    assert "hun" not in str(error.value)


@pytest.mark.parametrize("address", ["ftp://host/set", "file:///set", "s3://", "hf://models/a/b"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(UserError, match=f"--to {address} is no address that can be read; use"):
        Storage(address, source="--to ")


@pytest.mark.parametrize("address", ["https://host:80/set", "hf://datasets/a/b"])
def test_addresses_to_read_cannot_be_written(address: str) -> None:
    Storage("https://host:80/a@b/set")
    with pytest.raises(UserError, match=r"no address that can be written; use .* or hf://buckets/"):
        Storage(address, writable=True)


def test_addresses_and_paths(tmp_path: Path) -> None:
    assert is_address("s3://bucket/set")
    assert is_address("nothing-like-it://bucket")
    assert not is_address(str(tmp_path))
    assert not is_address("C:/set")


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_missing_package(monkeypatch: pytest.MonkeyPatch, scheme: str, package: str) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str) -> object:
        return None if name == package else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(UserError, match=rf"needs {package}: pip install 'llmtrain\[{scheme}\]'"):
        Storage(f"{scheme}://bucket/set")


def test_data_sets_of_the_hub_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Files:
        def resolve_path(self, path: str) -> SimpleNamespace:
            assert path == "hf://datasets/a/b@v1/set"
            return SimpleNamespace(repo_id="a/b", revision="v1", path_in_repo="set")

    class Api:
        def dataset_info(self, repo_id: str, revision: str) -> SimpleNamespace:
            assert (repo_id, revision) == ("a/b", "v1")
            return SimpleNamespace(sha="0123abcd")

    monkeypatch.setattr(huggingface_hub, "HfFileSystem", Files)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)

    assert str(Storage("hf://datasets/a/b@v1/set/")) == "hf://datasets/a/b@0123abcd/set"


# Web servers, and what they answer


Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def web_server(answer: Answer) -> Iterator[str]:
    """Start a server that answers every request by a function; yield its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # which asks for the body if the client waits for that

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer(self)

        do_PUT = do_HEAD = do_GET  # noqa: N815

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as front:
        threading.Thread(target=front.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{front.server_address[1]}"
        front.shutdown()


def send(
    request: http.server.BaseHTTPRequestHandler, status: int, body: bytes, **headers: str
) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.send_header("Connection", "close")
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def test_web_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PATIENCE", 1.0)

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        kind = request.path.split("/")[1]
        if kind in ("403", "404", "500"):
            return send(request, int(kind), b"")
        requested = request.headers.get("Range")
        if requested is None or kind == "whole":
            return send(request, 200, CONTENT)
        start, stop = map(int, requested.removeprefix("bytes=").split("-"))
        send(request, 206, CONTENT[start : stop + 1])

    with web_server(answer) as address:
        for kind in ("parts", "whole"):
            assert Storage(f"{address}/{kind}").read("file") == CONTENT
        assert Storage(f"{address}/parts").read("file", 16, 512) == CONTENT[16:512]
        with pytest.raises(StorageError, match="does not send parts of files; download"):
            Storage(f"{address}/whole").read("file", 16, 512)
        with pytest.raises(FileNotFoundError):
            Storage(f"{address}/404").read("file")
        with pytest.raises(StorageError, match="refuses"):
            Storage(f"{address}/403").read("file")
        with pytest.raises(StorageError, match="does not answer"):
            Storage(f"{address}/500").read("file")


# What S3 and others repeat of a request in an answer that refuses it.
ECHOES = {
    "S3": (
        "<Error><Code>SignatureDoesNotMatch</Code><Message>The signature differs.</Message>"
        "<AWSAccessKeyId>{key}</AWSAccessKeyId><StringToSign>{header}</StringToSign>"
        "<SignatureProvided>{signature}</SignatureProvided></Error>"
    ),
    "in the message": (
        "<Error><Code>AccessDenied</Code><Message>Authorization: {header} x-amz-security-token: "
        "{token}, {signature}</Message></Error>"
    ),
    "a page": "<html>\n<pre>{header}\n{token} {signature}</pre></html>",
    "text": "{header} {token}",
}


@pytest.mark.parametrize("echo", ECHOES)
def test_no_error_shows_a_credential(
    monkeypatch: pytest.MonkeyPatch, echo: str, tmp_path: Path
) -> None:
    token = "FwoGZXIvYXdzEJr//////////wEaDEXAMPLE" * 4
    # In a file, they are unknown to what redacts the values of variables.
    credentials = tmp_path / "credentials"
    credentials.write_text(
        f"[default]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n"
        f"aws_session_token={token}\n"
    )
    for name in [*os.environ]:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setattr(storage, "PATIENCE", 0.1)
    status = 0
    secrets = [KEY, SECRET, token]

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        header = request.headers["Authorization"]
        signature = header.partition("Signature=")[2]
        secrets.append(signature)
        text = ECHOES[echo].format(key=KEY, header=header, token=token, signature=signature)
        send(request, status, text.encode())

    with web_server(answer) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
        folder = Storage("s3://bucket/set", writable=True)
        for status in (200, 400, 403, 500):
            for action in ("part", "read", "sizes", "write", "create"):
                try:
                    message = str(ACTIONS[action](folder, tmp_path))
                except (UserError, FileNotFoundError) as error:
                    message = str(error)
                shown = [secret for secret in secrets if secret in message]
                assert shown == [], (status, action, message)

    assert len(secrets) > 20


def test_no_error_shows_the_signed_address_of_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PATIENCE", 0.1)
    query = "Policy=hunter2&Key-Pair-Id=hunter2&X-Amz-Signature=hunter2"

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        if "?" in request.path:
            return send(request, 403, b"")
        send(request, 302, b"", Location=f"/signed?{query}")

    with web_server(answer) as address, pytest.raises(StorageError) as error:
        Storage(address + "/set").read("file")

    assert "/signed" in str(error.value)
    assert "hunter2" not in str(error.value)
