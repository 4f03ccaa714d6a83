"""The folder store and what both stores share; the S3 store is tested against a server in tests/integration."""

from pathlib import Path

import pytest

from infra.atomic import new_file
from infra.settings import Settings
from infra.store import BadKey, MissingObject, Store, StoreDenied, StoreError, open_store
from tests.store_conformance import StoreConformance

pytestmark = pytest.mark.unit


class TestFolderStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"file://{tmp_path}/the%20store", Settings())

    def test_an_unfinished_write_is_not_listed_and_not_left(self, store: Store, tmp_path: Path) -> None:
        class Stopped(Exception):
            pass

        folder = tmp_path / "the store"
        with pytest.raises(Stopped), new_file(folder / "a") as file:  # noqa: PT012
            file.write(b"half")
            file.flush()
            assert [path.stat().st_size for path in folder.iterdir()] == [4]
            assert list(store.list()) == []
            raise Stopped
        assert list(folder.iterdir()) == []

    def test_a_link_out_of_the_folder_is_not_followed(self, store: Store, tmp_path: Path) -> None:
        store.put_bytes("inside/a", b"x")
        secret = tmp_path / "secret"
        secret.mkdir()
        (secret / "file").write_bytes(b"private")
        (tmp_path / "the store" / "link").symlink_to(secret)
        for action in (
            lambda: store.get_bytes("link/file", max_bytes=100),
            lambda: store.put_bytes("link/new", b""),
            lambda: store.delete("link/file"),
        ):
            with pytest.raises(BadKey, match="leads out of the store"):
                action()
        assert [key for key, _ in store.list()] == ["inside/a"]
        assert [path.name for path in secret.iterdir()] == ["file"]

    def test_a_name_is_a_file_or_a_folder(self, store: Store) -> None:
        store.put_bytes("a/b", b"")
        for key in ("a", "a/b/c"):
            with pytest.raises(StoreError, match="choose another key"):
                store.put_bytes(key, b"")

    def test_ensure_bucket_makes_the_folder(self, store: Store, tmp_path: Path) -> None:
        store.ensure_bucket()
        store.ensure_bucket()
        assert (tmp_path / "the store").is_dir()

    def test_its_uri_opens_it_again(self, store: Store) -> None:
        store.put_bytes("a", b"x")
        again = open_store(store.uri, Settings())
        assert again.uri == store.uri
        assert again.get_bytes("a", max_bytes=1) == b"x"


def test_opening_creates_nothing(tmp_path: Path) -> None:
    store = open_store((tmp_path / "not yet").as_uri(), Settings())
    with pytest.raises(MissingObject):
        store.get_bytes("a", max_bytes=1)
    assert list(store.list()) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "uri",
    [
        "relative/folder",
        "/abs/folder",
        "http://host/bucket",
        "file://host/folder",
        "file:relative",
        "file://",
        "file:///a?b",
        "s3://",
        "s3://b",
        "s3:///prefix",
        "s3://Upper_case/x",
        "s3://bucket/../other",
        "s3://bucket//x",
        "s3://bucket.with..dots",
    ],
)
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(BadKey, match="expected"):
        open_store(uri, Settings())


def test_half_a_key_pair_is_refused() -> None:
    with pytest.raises(StoreDenied, match="belong together"):
        open_store("s3://bucket", Settings.model_validate({"s3_access_key": "only"}))


def test_an_endpoint_that_is_no_url_is_named() -> None:
    with pytest.raises(StoreError, match="EAGLE3_S3_ENDPOINT is 'localhost:9000'"):
        open_store("s3://bucket", Settings(s3_endpoint="localhost:9000"))
