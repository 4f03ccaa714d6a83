"""Fetched or streamed: what training reads is the same, and the disk decides only which way."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from eagle3.dump.manifest import DumpError
from eagle3.dump.reader import DumpReader, SampleReader
from eagle3.dump.stream import StreamReader
from eagle3.refs import DumpRef
from infra.settings import Settings
from tasks.artifacts import WrongArtifact, dump_folder
from tasks.room import NoRoom
from tasks.training_data import open_training_data
from tests.dumps import capture, flip_bit, write_dump

pytestmark = pytest.mark.unit

Usage = namedtuple("Usage", "total used free")  # as shutil.disk_usage returns it


@pytest.fixture
def ref(tiny_llama: Path, tmp_path: Path) -> DumpRef:
    manifest = write_dump(capture(tiny_llama), tmp_path / "stored")
    return DumpRef(uri=(tmp_path / "stored").as_uri(), sha256=manifest.digest())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", store=(tmp_path / "store").as_uri())


def free(monkeypatch: pytest.MonkeyPatch, bytes_: int) -> None:
    """This machine's disk, as small as a dump is large."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(bytes_, 0, bytes_))


def equal(one: SampleReader, other: SampleReader) -> bool:
    return all(
        torch.equal(state, other.read(index).states[point])
        for index in range(len(one.records))
        for point, state in one.read(index).states.items()
    )


def test_a_dump_that_fits_is_fetched(ref: DumpRef, settings: Settings) -> None:
    data = open_training_data(ref, settings)
    assert isinstance(data.reader, DumpReader)
    assert (data.read_ahead, data.streamed) == (0, None)
    assert dump_folder(ref, settings).exists()


def test_a_stream_gives_the_samples_of_the_copy(ref: DumpRef, settings: Settings) -> None:
    copy = open_training_data(ref, settings)
    data = open_training_data(ref, settings.model_copy(update={"dump_streaming": "always"}))
    assert isinstance(data.reader, StreamReader)
    assert data.read_ahead > 0
    assert data.streamed is not None
    assert f"it is read from {ref.uri} in blocks of" in data.streamed
    assert equal(data.reader, copy.reader)
    assert equal(data.heldout_reader, copy.heldout_reader)


def test_a_dump_that_does_not_fit_is_streamed(
    ref: DumpRef, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = DumpReader.open(tmp_path / "stored").manifest
    large = manifest.model_copy(
        update={"shards": tuple(e.model_copy(update={"bytes": 10**12}) for e in manifest.shards)}
    )
    (tmp_path / "stored" / "manifest.json").write_bytes(large.canonical())
    ref = DumpRef(uri=ref.uri, sha256=large.digest())
    free(monkeypatch, 10**11)
    data = open_training_data(ref, settings)
    assert isinstance(data.reader, StreamReader)
    assert not dump_folder(ref, settings).exists()
    free(monkeypatch, 10**9)
    with pytest.raises(NoRoom, match=r"neither a copy nor the cache of a stream \(1.1 GB\) fits"):
        open_training_data(ref, settings)


def test_a_copy_that_is_there_is_read_however_full_the_disk(
    ref: DumpRef, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_training_data(ref, settings)
    free(monkeypatch, 10)
    assert isinstance(open_training_data(ref, settings).reader, DumpReader)


def test_a_damaged_sample_is_named_by_its_object(ref: DumpRef, settings: Settings, tmp_path: Path) -> None:
    for shard in (tmp_path / "stored").glob("shard-*"):
        flip_bit(shard)
    reader = open_training_data(ref, settings.model_copy(update={"dump_streaming": "always"})).reader
    with pytest.raises(DumpError, match=rf"{ref.uri}/shard-00000.safetensors: sample 'p00000', rows"):
        reader.read(0)


def test_another_dump_than_the_reference_names_is_refused(ref: DumpRef, settings: Settings) -> None:
    with pytest.raises(WrongArtifact, match="it was replaced after the reference was made"):
        open_training_data(DumpRef(uri=ref.uri, sha256="0" * 64), settings)
