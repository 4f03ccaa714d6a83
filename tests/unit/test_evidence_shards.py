"""The shards of a dump, looked at in parts by others: the report is the one of a single pass."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle3.dump.manifest import DumpError, Manifest
from eagle3.dump.reader import DumpReader
from eagle3.dump.writer import CapturedSample
from eagle3.evidence.report import EvidenceReport
from eagle3.evidence.shards import MAX_PARTS, ShardEvidence, examine_shards, parts_of
from eagle3.evidence.validate import validate_dump
from tests.dumps import Capture, capture, flip_bit, with_states, write_dump

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


def planted(sample: CapturedSample) -> CapturedSample:
    """NaN in one row of most samples: more findings than a report names, in several shards."""
    state = sample.states["layers.3"].clone()
    state[sample.prompt_tokens] = torch.nan
    return sample if sample.id == "p00003" else with_states(sample, {"layers.3": state})


def elsewhere(reader: DumpReader) -> Iterator[ShardEvidence]:
    """Each part by a worker that opens its own part of the dump, and sends what it saw."""
    for shards in parts_of(reader.manifest):
        part = DumpReader.open_part(reader.folder, shards, expect_sha256=reader.manifest.digest())
        assert len(part) == sum(len(reader.samples_of(shard)) for shard in shards)
        yield pickle.loads(pickle.dumps(examine_shards(part, shards)))


def content(report: EvidenceReport) -> dict[str, object]:
    return report.model_dump(exclude={"created_at"})


@pytest.mark.parametrize("fault", ["none", "nan", "flipped", "truncated", "missing"])
def test_a_report_of_parts_is_the_report_of_one_pass(captured: Capture, tmp_path: Path, fault: str) -> None:
    manifest = write_dump(captured, tmp_path, alter=planted if fault == "nan" else None)
    reader, shard = DumpReader.open(tmp_path), tmp_path / manifest.shards[2].name
    assert len(manifest.shards) > 3
    if fault == "flipped":
        flip_bit(shard, at=0.99)
    elif fault == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif fault == "missing":
        shard.unlink()
    alone = validate_dump(reader, captured.parts)
    shared = validate_dump(DumpReader.open(tmp_path), captured.parts, examined=elsewhere(reader))
    assert content(shared) == content(alone)
    assert (alone.verdict == "fail") == (fault != "none")
    if fault in ("flipped", "truncated", "missing"):
        assert shard.name in next(check for check in shared.failed() if check.name == "integrity").sentence
    if fault == "nan":
        assert "and 4 more" in next(check for check in shared.failed() if check.name == "finite").sentence


def test_parts_hold_every_shard_once_and_are_no_more_than_the_bound(captured: Capture, tmp_path: Path) -> None:
    manifest = write_dump(captured, tmp_path)
    for count in (1, 4, MAX_PARTS, MAX_PARTS + 1, 10 * MAX_PARTS + 7):
        parts = parts_of(Manifest.model_construct(shards=manifest.shards[:1] * count))
        assert [shard for part in parts for shard in part] == list(range(count))
        assert len(parts) == min(count, MAX_PARTS)


def test_a_part_of_another_dump_is_refused(captured: Capture, tmp_path: Path) -> None:
    manifest = write_dump(captured, tmp_path)
    with pytest.raises(DumpError, match="another dump than asked for"):
        DumpReader.open_part(tmp_path, range(1), expect_sha256="0" * 64)
    flip_bit(tmp_path / manifest.samples.name)
    with pytest.raises(DumpError, match=r"samples\.jsonl"):
        DumpReader.open_part(tmp_path, range(1), expect_sha256=manifest.digest())
