"""The reader: the same samples come back, and a dump that is not what its manifest says is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.dump.manifest import DumpError, Manifest
from eagle3.dump.reader import DumpReader
from tests.dumps import SPEC, Capture, capture, flip_bit, reseal, write_dump

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


@pytest.fixture
def dump(captured: Capture, tmp_path: Path) -> Path:
    folder = tmp_path / "dump"
    write_dump(captured, folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_sample_comes_back_as_it_was_captured(captured: Capture, tmp_path: Path, dtype: torch.dtype) -> None:
    manifest = write_dump(captured, tmp_path, dtype=dtype)
    reader = DumpReader.open(tmp_path, expect_sha256=manifest.digest())
    assert len(reader) == len(captured.samples)
    for sample, original in zip(reader, captured.samples, strict=True):
        assert sample.id == original.id
        assert torch.equal(sample.full_ids()[:-1], original.input_ids)
        assert int(sample.full_ids()[-1]) == original.last_token_id
        assert int(sample.loss_mask.sum()) == original.output_tokens - 1
        assert tuple(sample.states) == SPEC.points
        for point in SPEC.points:
            assert torch.equal(sample.states[point], original.states[point].to(dtype))


def test_a_sample_in_the_middle_is_read_without_the_others(captured: Capture, dump: Path) -> None:
    reader = DumpReader.open(dump)
    (dump / reader.manifest.shards[0].name).unlink()  # nobody needs it
    assert torch.equal(reader.read(5).states[SPEC.final], captured.samples[5].states[SPEC.final])


def test_samples_are_found_by_shard(dump: Path) -> None:
    reader = DumpReader.open(dump)
    ranges = [reader.samples_of(shard) for shard in range(len(reader.manifest.shards))]
    assert [i for indices in ranges for i in indices] == list(range(len(reader)))
    assert all(reader.records[i].shard == shard for shard, indices in enumerate(ranges) for i in indices)
    assert reader.cu_seqlens(1).tolist()[-1] == reader.manifest.shards[1].tokens


def test_a_dump_without_manifest_does_not_exist(dump: Path) -> None:
    (dump / "manifest.json").unlink()
    with pytest.raises(DumpError, match="does not exist, or extraction did not finish"):
        DumpReader.open(dump)
    with pytest.raises(DumpError, match="does not exist, or extraction did not finish"):
        DumpReader.open(dump / "nowhere")


def test_another_dump_than_the_expected_one_is_refused(dump: Path) -> None:
    with pytest.raises(DumpError, match=f"expected manifest digest {'0' * 64}, found"):
        DumpReader.open(dump, expect_sha256="0" * 64)


def test_a_missing_and_a_truncated_shard_are_named(dump: Path) -> None:
    reader = DumpReader.open(dump)
    first, second = (dump / entry.name for entry in reader.manifest.shards[:2])
    first.unlink()
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(DumpError, match=r"shard-00000.safetensors is missing"):
        reader.read(0)
    index = reader.samples_of(1)[0]
    with pytest.raises(DumpError, match=r"shard-00001.safetensors is truncated: \d+ bytes instead of \d+"):
        reader.read(index)


def test_a_file_that_is_no_safetensors_file_is_refused(dump: Path) -> None:
    shard = dump / "shard-00000.safetensors"
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    with pytest.raises(DumpError, match="not a safetensors file"):
        DumpReader.open(dump).read(0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "missing norm, foreign none"),
        ("foreign", "missing none, foreign pickle"),
        ("renamed", "missing layers.5, foreign layers.6"),
        ("dtype", r"norm: expected F32 \[\d+, 64\], found BF16"),
        ("width", r"norm: expected F32 \[\d+, 64\], found F32 \[\d+, 32\]"),
        ("rows", r"input_ids: expected I64 \[\d+\], found I64"),
    ],
)
def test_tensors_that_are_not_what_the_manifest_says_are_refused(dump: Path, how: str, message: str) -> None:
    path = dump / "shard-00000.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    if how == "missing":
        del tensors["norm"]
    elif how == "foreign":
        tensors["pickle"] = torch.zeros(1)
    elif how == "renamed":
        tensors["layers.6"] = tensors.pop("layers.5")
    elif how == "dtype":
        tensors["norm"] = tensors["norm"].bfloat16()
    elif how == "width":
        tensors["norm"] = tensors["norm"][:, :32].contiguous()
    else:
        tensors["input_ids"] = tensors["input_ids"][1:].clone()
    save_file(tensors, path)
    reseal(dump)
    with pytest.raises(DumpError, match=message):
        DumpReader.open(dump).read(0)


def test_a_link_that_leads_out_of_the_dump_is_refused(dump: Path, tmp_path: Path) -> None:
    shard = dump / "shard-00000.safetensors"
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(DumpError, match="leads out of the dump"):
        DumpReader.open(dump).read(0)


def test_samples_other_than_the_manifest_names_are_refused(dump: Path) -> None:
    flip_bit(dump / "samples.jsonl")
    with pytest.raises(DumpError, match=r"samples\.jsonl is not the file that the manifest names"):
        DumpReader.open(dump)
    with (dump / "samples.jsonl").open("ab") as file:
        file.write(b"\n")
    with pytest.raises(DumpError, match="longer than it was written"):
        DumpReader.open(dump)
    (dump / "samples.jsonl").unlink()
    with pytest.raises(DumpError, match=r"samples.jsonl is missing"):
        DumpReader.open(dump)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("twice", "line 2 .*this id came before"),
        ("gap", "starts at row 1 of its shard, but the samples before it end at row 0"),
        ("overlap", "starts at row 0 of its shard, but the samples before it end"),
        ("order", "lines follow the .* shards in order"),
        ("no such shard", "shard 99; lines follow"),
        ("fewer", "puts 0 samples and 0 rows into shard-0000"),
        ("rows", "into shard-0000"),
    ],
)
def test_an_index_that_contradicts_the_manifest_is_refused(dump: Path, how: str, message: str) -> None:
    records = list(DumpReader.open(dump).records)
    change = {
        "twice": (1, {"id": records[0].id}),
        "gap": (0, {"start": 1}),
        "overlap": (1, {"start": 0}),
        "no such shard": (len(records) - 1, {"shard": 99}),
        "rows": (len(records) - 1, {"rows": records[-1].rows + 1}),
    }
    if how in change:
        index, fields = change[how]
        records[index] = records[index].model_copy(update=fields)
    elif how == "order":
        records = records[::-1]
    else:
        records = records[:-1]
    reseal(dump, records)
    with pytest.raises(DumpError, match=message):
        DumpReader.open(dump)


@pytest.mark.parametrize(
    "line", [b"{}\n", b"\n", b"null\n", b"{" * 100_000 + b"\n", b'{"id": "' + b"a" * 50_000 + b'"}\n']
)
def test_lines_that_are_no_sample_are_refused(dump: Path, line: bytes) -> None:
    lines = (dump / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (dump / "samples.jsonl").write_bytes(b"".join([lines[0], line, *lines[2:]]))
    reseal(dump)
    with pytest.raises(DumpError, match=r"samples.jsonl, line 2"):
        DumpReader.open(dump)


def test_more_lines_than_samples_are_refused(dump: Path) -> None:
    lines = (dump / "samples.jsonl").read_bytes()
    (dump / "samples.jsonl").write_bytes(lines + lines)
    reseal(dump)
    with pytest.raises(DumpError, match="more lines than the 8 samples"):
        DumpReader.open(dump)


def test_a_manifest_of_another_schema_version_is_refused(dump: Path) -> None:
    path = dump / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"schema_version":3', b'"schema_version":7'))
    with pytest.raises(DumpError, match="schema version 7; this software reads versions 2 and 3"):
        DumpReader.open(dump)


def test_the_digest_of_the_reader_is_that_of_the_reference(captured: Capture, tmp_path: Path) -> None:
    manifest = write_dump(captured, tmp_path)
    assert isinstance(DumpReader.open(tmp_path).manifest, Manifest)
    assert DumpReader.open(tmp_path).manifest.digest() == manifest.digest()
