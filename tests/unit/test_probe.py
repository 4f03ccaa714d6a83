"""The probe's file: what is kept, that it is the same on every machine, that a broken or foreign one is refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from eagle3.capture import CapturePoint, CaptureSpec, all_points
from eagle3.dump.files import read_manifest
from eagle3.dump.manifest import DumpError
from eagle3.dump.probe import (
    MAX_TOKENS,
    PROBE_NAME,
    Probe,
    chosen_samples,
    fixed_texts,
    projection,
    read_dump_probe,
    read_probe,
    write_probe,
)
from eagle3.dump.reader import DumpReader
from eagle3.evidence.files import verify_integrity
from eagle3.evidence.references import ProbeReference
from eagle3.target import Target
from tests.dumps import SPEC, Capture, capture, flip_bit, probe_of, write_dump
from tests.targets import HIDDEN, LAYERS

pytestmark = pytest.mark.unit

PINNED = "33a6ee9c370182b27bc226fe7496c925fd6a7769402860a109a3fb3e8638ed20"


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


@pytest.fixture(scope="module")
def probe(captured: Capture) -> Probe:
    return probe_of(captured)


@pytest.fixture
def file(probe: Probe, tmp_path: Path) -> Path:
    write_probe(tmp_path / PROBE_NAME, probe)
    return tmp_path / PROBE_NAME


def test_the_projection_is_the_same_on_every_machine_and_in_every_version() -> None:
    """Probes of different years are compared: whoever changes these bytes breaks that."""
    matrix = projection(HIDDEN)
    assert (matrix.dtype, tuple(matrix.shape)) == (torch.float32, (HIDDEN, 64))
    assert hashlib.sha256(matrix.numpy().tobytes()).hexdigest() == PINNED
    assert set(matrix.unique().tolist()) == {-0.125, 0.125}
    assert not torch.equal(matrix, projection(HIDDEN, seed=1))
    assert not torch.equal(matrix, projection(2 * HIDDEN)[:HIDDEN])


def test_the_projection_keeps_distances() -> None:
    rows = torch.randn(256, 2048, generator=torch.Generator().manual_seed(1))
    rows[:, 7] = 300.0  # one huge dimension, as real targets have
    share = (rows @ projection(2048)).norm(dim=-1) / rows.norm(dim=-1)
    assert share.min() > 0.8
    assert share.max() < 1.2
    apart = ((rows[:128] - rows[128:]) @ projection(2048)).norm(dim=-1) / (rows[:128] - rows[128:]).norm(dim=-1)
    assert abs(apart.mean() - 1) < 0.03
    assert apart.std() < 0.12


def test_a_probe_comes_back_as_it_was_written(probe: Probe, file: Path) -> None:
    found = read_probe(file)
    assert found.info == probe.info
    for mine, theirs in ((found.rows, probe.rows), (found.captured, probe.captured)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[point], theirs[point]) for point in mine)
    assert torch.equal(found.projections, probe.projections)
    assert torch.equal(found.input_ids, probe.input_ids)
    assert tuple(found.rows) == ("embed", "layers.1", "layers.3", "layers.5", "layers.7", "norm")


def test_it_holds_the_projects_texts_and_the_beginnings_of_three_samples(captured: Capture, probe: Probe) -> None:
    texts = fixed_texts(Target.open(captured.target).tokenizer())
    kinds = [(sequence.kind, sequence.id) for sequence in probe.info.sequences]
    assert kinds == [
        *(("text", name) for name in texts),
        ("sample", "p00000"),
        ("sample", "p00004"),
        ("sample", "p00007"),
    ]
    assert all(len(ids) == MAX_TOKENS for ids in texts.values())
    assert probe.input_ids[: 3 * MAX_TOKENS].tolist() == [i for ids in texts.values() for i in ids]
    assert [chosen_samples(n) for n in (0, 1, 2, 3, 101)] == [[], [0], [0, 1], [0, 1, 2], [0, 50, 100]]


def test_as_a_reference_it_knows_the_first_rows_of_its_samples_alone(captured: Capture, probe: Probe) -> None:
    reference = ProbeReference(probe)
    assert (reference.name, reference.num_layers) == ("probe", LAYERS)
    assert reference.sample_ids == ("p00000", "p00004", "p00007")
    sample = captured.samples[4]
    states = reference.states(sample.id, sample.input_ids)
    assert states is not None
    assert tuple(states) == all_points(LAYERS)
    length = sample.prompt_tokens
    for point, state in states.items():
        assert tuple(state.shape) == (length, 64)
        torch.testing.assert_close(state, reference.project(sample.states[point][:length]))
    shorter = reference.states(sample.id, sample.input_ids[:3])
    assert shorter is not None
    assert torch.equal(shorter[CapturePoint("norm")], states[CapturePoint("norm")][:3])
    other = sample.input_ids.clone()
    other[2] += 1
    assert reference.states(sample.id, other) is None
    assert reference.states("p00001", captured.samples[1].input_ids) is None
    assert reference.states("prose", probe.input_ids[:MAX_TOKENS]) is None
    assert reference.norm(torch.zeros(1, 64)) is None


def rewrite(file: Path, *, info: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> None:
    """Change parts of a probe's file; None removes a tensor."""
    found = load_file(file)
    with safe_open(file, framework="pt") as opened:
        metadata = json.loads(opened.metadata()["probe"]) | (info or {})
    found |= {name.replace("__", "."): t for name, t in tensors.items() if t is not None}
    for name, tensor in tensors.items():
        if tensor is None:
            del found[name.replace("__", ".")]
    save_file(found, file, {"probe": json.dumps(metadata)})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"projections": None}, "missing projections"),
        ({"rows__layers__2": torch.zeros(2, 2)}, "foreign rows.layers.2"),
        ({"rows__embed": torch.zeros(3, HIDDEN)}, r"rows.embed: expected F32 \[\d+, 64\], found F32 \[3, 64\]"),
        ({"captured__norm": torch.zeros(161, HIDDEN, dtype=torch.float16)}, "captured.norm: expected F32"),
        ({"cu_seqlens": torch.arange(7)}, "cu_seqlens"),
        ({"info": {"num_layers": 9}}, "missing"),
        ({"info": {"num_layers": 10**9}}, "num_layers"),
        ({"info": {"hidden_size": 2**40}}, "hidden_size"),
        ({"info": {"captured": ["layers.8", "norm"]}}, "the target has no layers.8"),
        ({"info": {"captured": ["norm", "norm"]}}, "claimed twice"),
        ({"info": {"schema_version": 2}}, "schema_version"),
        ({"info": {"dims": 32}}, "dims"),
        ({"info": {"sequences": []}}, "sequences"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(file: Path, change: dict[str, Any], word: str) -> None:
    rewrite(file, **change)
    with pytest.raises(DumpError, match=word):
        read_probe(file)


def test_what_is_no_probe_at_all_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="there is no probe"):
        read_probe(tmp_path / "missing")
    plain = tmp_path / "plain.safetensors"
    save_file({"x": torch.zeros(1)}, plain)
    with pytest.raises(DumpError, match="does not say that it is a probe"):
        read_probe(plain)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DumpError, match="not a safetensors file"):
        read_probe(file)
    torch.save({"projections": torch.zeros(1)}, file)
    with pytest.raises(DumpError, match="not a safetensors file"):
        read_probe(file)


def test_the_probe_of_a_dump_is_the_one_that_its_manifest_names(captured: Capture, tmp_path: Path) -> None:
    manifest = write_dump(captured, tmp_path)
    found = read_dump_probe(tmp_path, manifest)
    assert found is not None
    assert found.info.captured == manifest.spec.points
    assert verify_integrity(tmp_path).verdict == "pass"
    flip_bit(tmp_path / PROBE_NAME)
    with pytest.raises(DumpError, match="sha256 differs"):
        read_dump_probe(tmp_path, manifest)
    report = verify_integrity(tmp_path)
    assert report.verdict == "fail"
    assert PROBE_NAME in report.checks[0].sentence
    (tmp_path / PROBE_NAME).unlink()
    with pytest.raises(DumpError, match="is missing"):
        read_dump_probe(tmp_path, manifest)


def test_the_probe_of_another_dump_is_refused(captured: Capture, tmp_path: Path) -> None:
    other = probe_of(captured, CaptureSpec(aux=("layers.0", "layers.3", "layers.5")))
    manifest = write_dump(captured, tmp_path, probe=other)
    with pytest.raises(DumpError, match=r"layers\.0, layers\.3.*belongs to another dump"):
        read_dump_probe(tmp_path, manifest)


def test_a_dump_without_a_probe_has_none(captured: Capture, tmp_path: Path) -> None:
    manifest = write_dump(captured, tmp_path, probe=False)
    assert manifest.probe is None
    assert read_dump_probe(tmp_path, read_manifest(tmp_path)) is None
    assert len(DumpReader.open(tmp_path)) == len(captured.samples)
    assert PROBE_NAME not in {entry.name for entry in manifest.files}


def test_a_name_of_the_manifest_cannot_lead_out_of_the_dump(captured: Capture, tmp_path: Path) -> None:
    manifest = write_dump(captured, tmp_path / "dump")
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    (tmp_path / "dump" / PROBE_NAME).unlink()
    (tmp_path / "dump" / PROBE_NAME).symlink_to(secret)
    with pytest.raises(DumpError, match="leads out of the dump"):
        read_dump_probe(tmp_path / "dump", manifest)


def test_what_is_kept_is_small(probe: Probe, file: Path) -> None:
    rows = len(probe.input_ids)
    states = (len(SPEC.points) + 6) * HIDDEN * 4
    assert file.stat().st_size < rows * (states + (LAYERS + 2) * 64 * 4 + 8) + 8192
