"""What both stores must do, written once. A test class inherits it and gives a fixture `store`."""

import hashlib
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.store import AlreadyExists, BadKey, MissingObject, Store, StoreCorrupt, StoreError

BAD_KEYS = [
    "",
    "/abs",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "./a",
    "a\\b",
    "a\nb",
    "a\x00b",
    "a\x7f",
    "\ud800",
    "x" * 1025,
    ".eagle3-part-0",
]


def write_file(path: Path, data: bytes) -> str:
    """Write a file and return its sha256."""
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


class StoreConformance:
    def test_bytes_come_back_as_they_went(self, store: Store) -> None:
        store.put_bytes("runs/a.json", b'{"x": 1}')
        assert store.get_bytes("runs/a.json", max_bytes=8) == b'{"x": 1}'
        store.put_bytes("runs/a.json", b"")
        assert store.get_bytes("runs/a.json", max_bytes=8) == b""

    def test_an_object_larger_than_expected_is_not_read(self, store: Store) -> None:
        store.put_bytes("large", b"123456789")
        with pytest.raises(StoreError, match="9 bytes, at most 8"):
            store.get_bytes("large", max_bytes=8)

    def test_a_range_comes_alone_and_never_shorter_than_asked(self, store: Store) -> None:
        store.put_bytes("shard", bytes(range(256)))
        assert store.get_range("shard", 0, 256) == bytes(range(256))
        assert store.get_range("shard", 7, 3) == bytes([7, 8, 9])
        assert store.get_range("shard", 255, 1) == bytes([255])
        assert store.get_range("shard", 3, 0) == b""
        for start, length in ((250, 7), (256, 1), (1000, 1)):
            with pytest.raises(StoreCorrupt, match=f"/shard should have {length} bytes from {start} on"):
                store.get_range("shard", start, length)
        with pytest.raises(MissingObject, match="/nowhere does not exist"):
            store.get_range("nowhere", 0, 1)

    @pytest.mark.parametrize("size", [0, 5, 3 * 2**20 + 1])
    def test_files_come_back_as_they_went(self, store: Store, tmp_path: Path, size: int) -> None:
        data = bytes(range(256)) * (size // 256 + 1)
        sha256 = write_file(tmp_path / "in", data[:size])
        store.put_file("dumps/a/shard-00000.safetensors", tmp_path / "in", sha256=sha256)
        target = tmp_path / "new" / "folder" / "out"
        store.get_file("dumps/a/shard-00000.safetensors", target, sha256=sha256, size=size)
        assert target.read_bytes() == data[:size]
        assert [path.name for path in target.parent.iterdir()] == ["out"]

    def test_a_file_that_is_not_what_its_writer_says_is_not_stored(self, store: Store, tmp_path: Path) -> None:
        write_file(tmp_path / "in", b"changed since")
        with pytest.raises(StoreCorrupt, match="changed after it was written"):
            store.put_file("a", tmp_path / "in", sha256="0" * 64)
        assert not store.exists("a")

    def test_a_file_that_is_not_there_is_named(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="nowhere cannot be read"):
            store.put_file("a", tmp_path / "nowhere", sha256="0" * 64)

    def test_a_wrong_digest_is_found_and_nothing_is_left(self, store: Store, tmp_path: Path) -> None:
        store.put_bytes("dumps/a/samples.jsonl", b"damaged")
        folder = tmp_path / "local"
        folder.mkdir()
        (folder / "samples.jsonl").write_bytes(b"of before")
        with pytest.raises(StoreCorrupt, match=r"dumps/a/samples\.jsonl should have sha256 " + "0" * 64):
            store.get_file("dumps/a/samples.jsonl", folder / "samples.jsonl", sha256="0" * 64, size=7)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"samples.jsonl": b"of before"}

    def test_a_wrong_size_is_found_and_nothing_is_left(self, store: Store, tmp_path: Path) -> None:
        store.put_bytes("a", b"truncated")
        with pytest.raises(StoreCorrupt, match="should have 10 bytes, it has 9"):
            store.get_file("a", tmp_path / "out", sha256=hashlib.sha256(b"truncated").hexdigest(), size=10)
        assert list(tmp_path.glob("out*")) == []

    def test_without_a_digest_the_object_is_still_fetched_whole(self, store: Store, tmp_path: Path) -> None:
        store.put_bytes("config.json", b"{}")
        store.get_file("config.json", tmp_path / "config.json")
        assert (tmp_path / "config.json").read_bytes() == b"{}"

    def test_if_absent_refuses_what_is_there(self, store: Store) -> None:
        store.put_bytes("manifest.json", b"first", if_absent=True)
        with pytest.raises(AlreadyExists, match=r"manifest\.json exists already"):
            store.put_bytes("manifest.json", b"first", if_absent=True)
        assert store.get_bytes("manifest.json", max_bytes=100) == b"first"
        store.put_bytes("manifest.json", b"second")
        assert store.get_bytes("manifest.json", max_bytes=100) == b"second"

    def test_of_many_writers_with_if_absent_one_wins(self, store: Store) -> None:
        won: list[int] = []

        def write(number: int) -> None:
            try:
                store.put_bytes("race", str(number).encode(), if_absent=True)
                won.append(number)
            except AlreadyExists:
                pass

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get_bytes("race", max_bytes=10) == str(won[0]).encode()

    def test_a_missing_object_is_named(self, store: Store, tmp_path: Path) -> None:
        store.put_bytes("here/a", b"")
        for key in ("here", "nowhere", "here/b", "here/a/b"):
            with pytest.raises(MissingObject, match=f"/{key} does not exist"):
                store.get_bytes(key, max_bytes=1)
            with pytest.raises(MissingObject, match=f"/{key} does not exist"):
                store.get_file(key, tmp_path / "out", sha256="0" * 64, size=1)
            assert not store.exists(key)

    def test_listing_gives_keys_and_sizes_in_order(self, store: Store) -> None:
        for key, data in {"b/2": b"22", "a": b"", "b/1": b"1", "bc": b"333", "b/é/ü": b"4444"}.items():
            store.put_bytes(key, data)
        assert list(store.list()) == [("a", 0), ("b/1", 1), ("b/2", 2), ("b/é/ü", 4), ("bc", 3)]
        assert list(store.list("b/")) == [("b/1", 1), ("b/2", 2), ("b/é/ü", 4)]
        assert list(store.list("b/1")) == [("b/1", 1)]
        assert [key for key, _ in store.list("b")] == ["b/1", "b/2", "b/é/ü", "bc"]
        assert list(store.list("nothing/here")) == []

    def test_a_listing_says_when_each_object_was_last_written(self, store: Store) -> None:
        before = datetime.now(UTC) - timedelta(seconds=2)  # S3 keeps whole seconds
        store.put_bytes("b/2", b"22")
        store.put_bytes("a", b"x")
        first, second = store.entries()
        assert [(first.key, first.bytes), (second.key, second.bytes)] == [("a", 1), ("b/2", 2)]
        assert all(before <= entry.modified <= datetime.now(UTC) + timedelta(seconds=2) for entry in (first, second))

    def test_deleting_is_not_an_error_twice(self, store: Store) -> None:
        store.put_bytes("a", b"x")
        assert store.exists("a")
        store.delete("a")
        store.delete("a")
        assert not store.exists("a")

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_keys_that_could_leave_the_prefix_are_refused(self, store: Store, tmp_path: Path, key: str) -> None:
        actions = [
            lambda: store.put_bytes(key, b""),
            lambda: store.put_file(key, tmp_path / "in", sha256="0" * 64),
            lambda: store.get_bytes(key, max_bytes=1),
            lambda: store.get_range(key, 0, 1),
            lambda: store.get_file(key, tmp_path / "out", sha256="0" * 64, size=1),
            lambda: store.exists(key),
            lambda: store.delete(key),
        ]
        for action in actions:
            with pytest.raises(BadKey):
                action()

    def test_an_object_has_a_uri(self, store: Store) -> None:
        assert store.uri_of("a/b").endswith("/a/b")
        assert store.uri_of("a") == f"{store.uri}/a"
