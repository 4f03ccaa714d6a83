"""The cache of streamed pieces: never larger than it may be, never half a file, shared by processes."""

import multiprocessing
import os
from pathlib import Path

import pytest

from eagle3.dump.cache import BlockCache
from eagle3.dump.manifest import DumpError

pytestmark = pytest.mark.unit


def parts(text: bytes) -> list[memoryview]:
    return [memoryview(text[:2]), memoryview(text[2:])]


def names(cache: BlockCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir() if not path.name.startswith(".")}


def age(cache: BlockCache, name: str, seconds: int) -> None:
    path = cache.folder / name
    os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def test_spans_of_a_file_come_back(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "new" / "cache", 100)
    assert cache.read("a", 6, [(0, 6)]) is None
    cache.write("a", parts(b"abcdef"))
    assert cache.read("a", 6, [(0, 2), (3, 3)]) == [b"ab", b"def"]
    assert cache.used() == 6
    cache.drop("a")
    cache.drop("a")
    assert cache.read("a", 6, [(0, 6)]) is None


def test_a_file_of_another_size_is_not_taken(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 100)
    cache.write("a", parts(b"abcdef"))
    (tmp_path / "a").write_bytes(b"abc")
    assert cache.read("a", 6, [(0, 2)]) is None
    assert cache.read("a", 3, [(2, 5)]) is None


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 20)
    for number, name in enumerate(("a", "b")):
        cache.write(name, parts(b"x" * 10))
        age(cache, name, 100 - number)
    assert cache.read("a", 10, [(0, 1)]) is not None  # now it is the younger one
    cache.write("c", parts(b"x" * 10))
    assert names(cache) == {"a", "c"}
    cache.write("d", parts(b"x" * 15))
    assert names(cache) == {"d"}
    cache.write("e", parts(b"x" * 21))  # larger than all of it
    assert names(cache) == {"d"}


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 20)
    (tmp_path / ".partial").write_bytes(b"x" * 19)
    cache.write("a", parts(b"x" * 10))
    assert names(cache) == {"a"}
    assert not (tmp_path / ".partial").exists()


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    for name in ("../a", "", ".partial", "a/b", "A"):
        with pytest.raises(DumpError, match="not a name"):
            BlockCache(tmp_path, 20).write(name, parts(b"abc"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DumpError, match=r"the cache of streamed dumps in .*file/cache cannot be used"):
        BlockCache(tmp_path / "file" / "cache", 20)


def _work(folder: Path, seed: int, failed) -> None:
    cache = BlockCache(folder, 50_000)
    for number in range(120):
        name = f"{(number * 7 + seed) % 17}"
        content = name.encode().ljust(4, b".") * 2500
        found = cache.read(name, len(content), [(0, 4), (4, len(content) - 4)])
        if found is not None and b"".join(found) != content:
            failed.set()
        if found is None:
            cache.write(name, [memoryview(content)])


def test_processes_share_a_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    failed = context.Event()
    workers = [context.Process(target=_work, args=(tmp_path, seed, failed)) for seed in (0, 5, 11)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert not failed.is_set()
    assert BlockCache(tmp_path, 0).used() <= 50_000
