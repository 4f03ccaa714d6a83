"""Run every check on a dump, in one pass over its shards."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from eagle3.dump.manifest import DumpError
from eagle3.dump.reader import DumpReader, read_manifest
from eagle3.evidence.alignment import FinalState, FinalStateParts
from eagle3.evidence.capture_list import check_capture_list, check_engine_ids
from eagle3.evidence.examination import Examination, Findings
from eagle3.evidence.integrity import Content, FileIntegrity
from eagle3.evidence.norms import RowNorms
from eagle3.evidence.report import Check, EvidenceReport
from eagle3.evidence.rows import Completeness, TokenIds
from eagle3.evidence.slots import DistinctSlots, Embed, FinalNorm


def validate_dump(
    reader: DumpReader, parts: FinalStateParts, *, on_progress: Callable[[int, int], None] | None = None
) -> EvidenceReport:
    """Every check on an open dump. `on_progress(done, total)` counts samples.

    A check that could not see every sample (a broken shard) fails and says why; nothing is skipped silently.
    """
    manifest = reader.manifest
    files = FileIntegrity(reader.folder, manifest.digest())
    completeness, norms = Completeness(manifest), RowNorms(manifest)
    final_state = FinalState(manifest, parts, answer_tokens=sum(record.output_tokens for record in reader.records))
    examinations: tuple[Examination, ...] = (
        Content(manifest),
        completeness,
        TokenIds(manifest),
        norms,
        DistinctSlots(manifest),
        Embed(manifest, parts.embedding),
        FinalNorm(manifest, parts.final_norm),
        final_state,
    )
    files.see_manifest()
    files.see_file(manifest.samples)
    unread = Findings()
    for shard, entry in enumerate(manifest.shards):
        files.see_file(entry)  # just before its samples, which then come from memory
        completeness.see_shard(reader, shard)
        for index in reader.samples_of(shard):
            try:
                sample = reader.read(index)
            except DumpError as error:
                unread.add(f"{reader.records[index].id!r}: {error}")
                continue
            for examination in examinations:
                examination.see(sample)
            if on_progress is not None:
                on_progress(index + 1, len(reader))
    seen = [check for examination in examinations for check in examination.conclude()]
    return EvidenceReport(
        dump_sha256=manifest.digest(),
        checks=(
            *files.conclude(),
            check_capture_list(manifest),
            check_engine_ids(manifest),
            *_unless_unread(seen, unread, len(reader)),
        ),
        statistics=norms.statistics(),
        offsets=final_state.offsets(),
        created_at=datetime.now(UTC),
    )


def verify_integrity(folder: Path, *, expect_sha256: str | None = None) -> EvidenceReport:
    """The file checks alone: is this the dump that was published, byte for byte?

    Raises DumpError where there is no manifest to check against.
    """
    manifest = read_manifest(folder)
    files = FileIntegrity(folder, expect_sha256 or manifest.digest())
    files.see_manifest()
    for entry in (manifest.samples, *manifest.shards):
        files.see_file(entry)
    return EvidenceReport(dump_sha256=manifest.digest(), checks=tuple(files.conclude()), created_at=datetime.now(UTC))


def _unless_unread(checks: Iterable[Check], unread: Findings, total: int) -> list[Check]:
    """A check that passed on a part of the dump did not pass."""
    if not unread.count:
        return list(checks)
    reason = f"{total - unread.count} of {total} samples could be read. Not read: {unread}"
    return [
        check
        if check.verdict == "fail"
        else check.model_copy(update={"verdict": "fail", "sentence": f"This check saw a part of the dump: {reason}."})
        for check in checks
    ]
