"""Evidence about files and rows: a fault is planted in a real dump, and the right check must name it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.capture import CapturePoint
from eagle3.dump.manifest import DumpError
from eagle3.dump.reader import DumpReader
from eagle3.dump.writer import CapturedSample
from eagle3.evidence.files import verify_integrity
from eagle3.evidence.references import Reference
from eagle3.evidence.report import Check, EvidenceReport
from eagle3.evidence.validate import validate_dump
from tests.dumps import SPEC, Capture, capture, flip_bit, reference_of, reseal, with_states, write_dump
from tests.targets import VOCAB

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama)


@pytest.fixture
def dump(captured: Capture, tmp_path: Path) -> Path:
    write_dump(captured, tmp_path / "dump")
    return tmp_path / "dump"


def judge(captured: Capture, folder: Path, reference: Reference | None = None) -> EvidenceReport:
    return validate_dump(DumpReader.open(folder), captured.parts, reference=reference)


def failed(report: EvidenceReport) -> dict[str, Check]:
    """What failed beside the probe, which sees most faults too, and has tests of its own."""
    return {check.name: check for check in report.failed() if check.name != "probe"}


@pytest.mark.parametrize(
    ("target_dtype", "stored"),
    [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None), (torch.float32, torch.float16)],
)
def test_a_clean_dump_passes_every_check(
    tiny_llama: Path, tmp_path: Path, target_dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    captured = capture(tiny_llama, dtype=target_dtype)
    write_dump(captured, tmp_path, dtype=stored)
    report = judge(captured, tmp_path, reference_of(tiny_llama))
    assert [(c.name, c.sentence) for c in report.checks if c.verdict != "pass"] == []
    assert report.verdict == "pass"
    assert {c.name for c in report.checks} == {
        *("integrity", "content", "completeness", "token_ids", "capture_list", "engine_ids"),
        *("finite", "norms", "distinct_slots", "embed", "final_norm", "final_state", "prompt_rows"),
        *("probe", "attribution"),
    }


def test_a_clean_dump_of_a_deepseek_target_passes(tiny_deepseek: Path, tmp_path: Path) -> None:
    captured = capture(tiny_deepseek)
    write_dump(captured, tmp_path)
    assert judge(captured, tmp_path, reference_of(captured.target)).verdict == "pass"


def test_progress_counts_the_samples(captured: Capture, dump: Path) -> None:
    seen: list[tuple[int, int]] = []
    validate_dump(DumpReader.open(dump), captured.parts, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, 8) for i in range(8)]


def test_a_flipped_bit_is_found_in_its_file_and_in_its_sample(captured: Capture, dump: Path) -> None:
    assert verify_integrity(dump).verdict == "pass"
    flip_bit(dump / "shard-00001.safetensors", at=0.99)  # the last tensor: a state
    for report in (judge(captured, dump), verify_integrity(dump)):
        check = failed(report)["integrity"]
        assert "shard-00001.safetensors: sha256" in check.sentence
        assert "fetch it again" in check.sentence
    assert "sample 'p0000" in failed(judge(captured, dump))["content"].sentence


def test_a_truncated_shard_fails_every_check_that_could_not_see_it(captured: Capture, dump: Path) -> None:
    reader = DumpReader.open(dump)
    path = dump / reader.manifest.shards[1].name
    path.write_bytes(path.read_bytes()[:-1])
    broken = failed(judge(captured, dump))
    assert "shard-00001.safetensors is truncated" in broken["integrity"].sentence
    lost = len(reader.samples_of(1))
    for name in ("content", "token_ids", "finite", "norms", "distinct_slots", "embed", "final_norm", "final_state"):
        assert name in broken
    assert f"{8 - lost} of 8 samples could be read" in broken["finite"].sentence
    assert "capture_list" not in broken  # it needs no shard


@pytest.mark.parametrize("name", ["samples.jsonl", "shard-00000.safetensors"])
def test_a_missing_file_is_found(dump: Path, name: str) -> None:
    (dump / name).unlink()
    assert f"{name} is missing" in failed(verify_integrity(dump))["integrity"].sentence


def test_changed_samples_are_found_without_opening_the_dump(dump: Path) -> None:
    flip_bit(dump / "samples.jsonl")
    assert "samples.jsonl: sha256" in failed(verify_integrity(dump))["integrity"].sentence


def test_a_manifest_that_was_changed_is_not_the_one_that_was_asked_for(captured: Capture, dump: Path) -> None:
    reader = DumpReader.open(dump)
    expected = reader.manifest.digest()
    reseal(dump, git_commit="0" * 40)
    assert verify_integrity(dump).verdict == "pass"
    assert "manifest.json: digest" in failed(verify_integrity(dump, expect_sha256=expected))["integrity"].sentence
    assert "manifest.json: digest" in failed(validate_dump(reader, captured.parts))["integrity"].sentence


def test_no_manifest_no_report(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="extraction did not finish"):
        verify_integrity(tmp_path)


def rewrite(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a tensor of a shard and seal the dump again: the files fit the manifest, the content does not."""
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    tensors[name] = change(tensors[name])
    save_file(tensors, path)
    reseal(path.parent)


def test_a_shard_rewritten_with_fitting_digests_is_found_by_its_content(captured: Capture, dump: Path) -> None:
    rewrite(dump / "shard-00000.safetensors", "layers.3", lambda state: state.index_fill(0, torch.tensor([2]), 1.0))
    assert verify_integrity(dump).verdict == "pass"
    broken = failed(judge(captured, dump))
    assert set(broken) == {"content"}
    assert "not those that were captured: sample 'p00000'" in broken["content"].sentence


def test_swapped_sample_ids_are_found(captured: Capture, dump: Path) -> None:
    records = list(DumpReader.open(dump).records)
    first, second = records[0], records[1]
    records[:2] = [first.model_copy(update={"id": second.id}), second.model_copy(update={"id": first.id})]
    reseal(dump, records)
    broken = failed(judge(captured, dump))
    assert set(broken) == {"content"}
    assert "sample 'p00001'; sample 'p00000'" in broken["content"].sentence
    assert "samples were exchanged" in broken["content"].sentence


def test_token_ids_under_another_sample_are_found(captured: Capture, dump: Path) -> None:
    records = list(DumpReader.open(dump).records)
    records[0] = records[0].model_copy(update={"ids_sha256": records[1].ids_sha256})
    reseal(dump, records)
    assert "'p00000': its ids are not those that were hashed" in failed(judge(captured, dump))["token_ids"].sentence


def test_a_sample_that_was_left_out_is_found_though_every_other_one_is_right(captured: Capture, tmp_path: Path) -> None:
    whole = write_dump(captured, tmp_path / "whole")
    write_dump(replace(captured, samples=captured.samples[:-1]), tmp_path / "part")
    reseal(tmp_path / "part", content_digest=whole.content_digest)
    broken = failed(judge(captured, tmp_path / "part"))
    assert set(broken) == {"content"}
    assert "added, left out or renamed" in broken["content"].sentence


def test_missing_rows_are_found_and_the_prefix_cache_is_named(captured: Capture, dump: Path) -> None:
    records = list(DumpReader.open(dump).records)
    records[2] = records[2].model_copy(update={"output_tokens": records[2].output_tokens + 3})
    reseal(dump, records)
    check = failed(judge(captured, dump))["completeness"]
    rows = records[2].rows
    assert f"sample 'p00002' has {rows} rows for {rows + 3} tokens" in check.sentence
    assert "prefix cache" in check.sentence
    assert "disable_radix_cache was True" in check.sentence


def test_rows_that_begin_at_the_answer_are_named(captured: Capture, dump: Path) -> None:
    records = list(DumpReader.open(dump).records)
    records[2] = records[2].model_copy(update={"output_tokens": records[2].rows})
    reseal(dump, records)
    sentence = failed(judge(captured, dump))["completeness"].sentence
    assert "1 of them have rows for the answer only: those of the prompt are missing" in sentence


def test_a_prompt_cut_away_altogether_breaks_no_other_check(captured: Capture, dump: Path) -> None:
    records = list(DumpReader.open(dump).records)
    records[2] = records[2].model_copy(update={"prompt_tokens": 10_000})
    reseal(dump, records)
    broken = failed(judge(captured, dump))
    assert "'p00002'" in broken["completeness"].sentence
    assert "loss mask" in broken["token_ids"].sentence


def test_packing_that_contradicts_the_index_is_found(captured: Capture, dump: Path) -> None:
    def shift(lengths: torch.Tensor) -> torch.Tensor:
        lengths[1] += 1
        return lengths

    rewrite(dump / "shard-00000.safetensors", "cu_seqlens", shift)
    broken = failed(judge(captured, dump))
    assert set(broken) == {"completeness"}
    assert "cu_seqlens of shard-00000.safetensors" in broken["completeness"].sentence


def test_a_loss_mask_that_does_not_mark_the_answer_is_found(captured: Capture, dump: Path) -> None:
    rewrite(dump / "shard-00000.safetensors", "loss_mask", lambda mask: mask.roll(1))
    broken = failed(judge(captured, dump))
    assert set(broken) == {"token_ids"}
    assert "the loss mask does not mark its answer" in broken["token_ids"].sentence


def test_an_empty_loss_mask_is_found(tiny_llama: Path, tmp_path: Path) -> None:
    captured = capture(tiny_llama, max_new_tokens=1)
    write_dump(captured, tmp_path)
    broken = failed(judge(captured, tmp_path))
    assert set(broken) == {"token_ids"}
    assert "The loss mask is empty" in broken["token_ids"].sentence


def test_an_id_outside_the_vocabulary_is_found(captured: Capture, tmp_path: Path) -> None:
    write_dump(captured, tmp_path, alter=lambda s: replace(s, last_token_id=VOCAB) if s.id == "p00003" else s)
    broken = failed(judge(captured, tmp_path))
    assert f"sample 'p00003': id {VOCAB} is outside 0 ... {VOCAB - 1}" in broken["token_ids"].sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_named_by_sample_row_and_point(
    captured: Capture, tmp_path: Path, value: float
) -> None:
    def plant(sample: CapturedSample) -> CapturedSample:
        if sample.id != "p00004":
            return sample
        state = sample.states["layers.3"].clone()
        state[7, 5] = value
        return with_states(sample, {"layers.3": state})

    write_dump(captured, tmp_path, alter=plant)
    report = judge(captured, tmp_path)
    assert set(failed(report)) == {"finite"}
    check = failed(report)["finite"]
    assert "sample 'p00004', row 7, layers.3" in check.sentence
    assert check.points == ("layers.3",)
    statistics = next(s for s in report.statistics if s.point == "layers.3")
    assert statistics.nonfinite_rows == 1
    assert statistics.mean_norm is not None


def test_a_slot_without_any_finite_row_is_reported_and_not_averaged(captured: Capture, tmp_path: Path) -> None:
    write_dump(captured, tmp_path, alter=lambda s: with_states(s, {"norm": s.states["norm"] * float("nan")}))
    report = judge(captured, tmp_path)
    assert {"finite", "final_norm", "final_state"} <= set(failed(report))
    statistics = report.statistics[-1]
    assert (statistics.rows, statistics.mean_norm, statistics.median_norm) == (0, None, None)
    assert "| `norm` | 0 |" in report.markdown()


def test_values_near_overflow_warn_in_float16_only(captured: Capture, tmp_path: Path) -> None:
    def plant(sample: CapturedSample) -> CapturedSample:
        state = sample.states["layers.5"].clone()
        state[0, 0] = 60_000.0
        return with_states(sample, {"layers.5": state})

    for dtype, verdict in ((torch.float16, "warn"), (torch.bfloat16, "pass")):
        folder = tmp_path / str(dtype)
        write_dump(captured, folder, alter=plant, dtype=dtype)
        check = next(c for c in judge(captured, folder).checks if c.name == "finite")
        assert check.verdict == verdict
    assert SPEC.points[2] == CapturePoint("layers.5")


def test_statistics_are_those_of_the_rows(captured: Capture, dump: Path) -> None:
    report = judge(captured, dump)
    for statistics in report.statistics:
        norms = torch.cat([s.states[statistics.point].norm(dim=-1) for s in captured.samples])
        assert statistics.rows == len(norms)
        assert statistics.mean_norm == pytest.approx(float(norms.mean()), rel=1e-4)
        assert statistics.std_norm == pytest.approx(float(norms.std(correction=0)), rel=1e-3)
        assert statistics.max_norm == pytest.approx(float(norms.max()), rel=1e-4)
        assert statistics.median_norm == pytest.approx(float(norms.median()), rel=0.02)
        assert statistics.p95_norm == pytest.approx(float(norms.quantile(0.95)), rel=0.03)
        assert statistics.mean_rms == pytest.approx(float(norms.mean()) / 8, rel=1e-4)  # sqrt(64)
