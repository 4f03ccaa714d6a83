"""Run every check on a dump, in one pass over its shards."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from eagle3.dump.manifest import DumpError
from eagle3.dump.probe import Probe, read_dump_probe
from eagle3.dump.reader import DumpReader
from eagle3.evidence.alignment import FinalStateParts
from eagle3.evidence.attribution_check import check_attribution
from eagle3.evidence.capture_list import check_capture_list, check_engine_ids
from eagle3.evidence.examination import Examination, Findings
from eagle3.evidence.files import FileIntegrity
from eagle3.evidence.integrity import Content
from eagle3.evidence.norms import RowNorms
from eagle3.evidence.probe_checks import ProbeRows
from eagle3.evidence.references import Reference
from eagle3.evidence.report import Check, EvidenceReport
from eagle3.evidence.rows import Completeness, TokenIds
from eagle3.evidence.slots import DistinctSlots, Embed, FinalNorm
from eagle3.evidence.standing import thresholds
from eagle3.evidence.text_alignment import PromptRows, examine_answers


def validate_dump(
    reader: DumpReader,
    parts: FinalStateParts,
    *,
    reference: Reference | None = None,
    why_no_reference: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> EvidenceReport:
    """Every check on an open dump. `on_progress(done, total)` counts samples.

    `reference` is what the slots are attributed with; without one the check `attribution` warns, and says why.

    A check that could not see every sample (a broken shard) fails and says why; nothing is skipped silently.
    """
    manifest = reader.manifest
    files = FileIntegrity(reader.folder, manifest.digest())
    completeness, norms = Completeness(manifest), RowNorms(manifest)
    final_state = examine_answers(manifest, parts, answer_tokens=sum(r.output_tokens for r in reader.records))
    probe, broken = _probe_of(reader)
    token_ids = TokenIds(manifest)
    examinations: tuple[Examination, ...] = (
        Content(manifest),
        completeness,
        token_ids,
        norms,
        DistinctSlots(manifest),
        Embed(manifest, parts.embedding),
        FinalNorm(manifest, parts.final_norm),
        ProbeRows(
            manifest,
            probe,
            embedding=parts.embedding,
            final_norm=parts.final_norm,
            rms_norm_eps=parts.rms_norm_eps,
            unreadable=broken,
        ),
        final_state,
        PromptRows(manifest, parts, prompt_tokens=sum(r.prompt_tokens for r in reader.records)),
    )
    files.see_manifest()
    for small in (manifest.samples, manifest.probe):
        if small is not None:
            files.see_file(small)
    unread = Findings()
    for shard, entry in enumerate(manifest.shards):
        for file in (entry, *([entry.answers] if entry.answers else [])):
            files.see_file(file)  # just before its samples, which then come from memory
        completeness.see_shard(reader, shard)
        token_ids.see_shard(reader, shard)
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
    attributed, attribution = check_attribution(reader, reference, why_none=why_no_reference)
    seen = [check for examination in examinations for check in examination.conclude()]
    return EvidenceReport(
        dump_sha256=manifest.digest(),
        checks=(
            *files.conclude(),
            check_capture_list(manifest),
            check_engine_ids(manifest),
            *_unless_unread(seen, unread, len(reader)),
            attributed,
        ),
        statistics=norms.statistics(),
        offsets=final_state.offsets(),
        attribution=attribution,
        thresholds=thresholds(),
        created_at=datetime.now(UTC),
    )


def _probe_of(reader: DumpReader) -> tuple[Probe | None, str]:
    """The dump's probe, or why it cannot be used."""
    try:
        return read_dump_probe(reader.folder, reader.manifest), ""
    except DumpError as error:
        return None, str(error)


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
