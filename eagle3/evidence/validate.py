"""Run every check on a dump, in one pass over its shards."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from eagle3.dump.manifest import DumpError
from eagle3.dump.probe import Probe, read_dump_probe
from eagle3.dump.reader import DumpReader
from eagle3.evidence.alignment import FinalStateParts
from eagle3.evidence.attribution_check import check_attribution
from eagle3.evidence.capture_list import check_capture_list, check_engine_ids
from eagle3.evidence.examination import Examination
from eagle3.evidence.findings import Findings
from eagle3.evidence.probe_checks import ProbeRows
from eagle3.evidence.references import Reference
from eagle3.evidence.report import Check, EvidenceReport
from eagle3.evidence.rows import Completeness, TokenIds
from eagle3.evidence.shards import ShardEvidence, examine_shards, parts_of
from eagle3.evidence.slots import DistinctSlots, Embed, FinalNorm
from eagle3.evidence.standing import thresholds
from eagle3.evidence.text_alignment import PromptRows, examine_answers


def validate_dump(
    reader: DumpReader,
    parts: FinalStateParts,
    *,
    reference: Reference | None = None,
    why_no_reference: str = "",
    examined: Iterable[ShardEvidence] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvidenceReport:
    """Every check on an open dump. `on_progress(done, total)` counts samples.

    `reference` is what the slots are attributed with; without one the check `attribution` warns, and says why.

    `examined` is what `examine_shards` says of each of `parts_of(reader.manifest)`, in order, where others do that
    work; the rest follows part by part while they are at the next ones. Unset: it is done here, with the same report.

    A check that could not see every sample (a broken shard) fails and says why; nothing is skipped silently.
    """
    manifest = reader.manifest
    whole = ShardEvidence.begin(reader)
    completeness, token_ids = Completeness(manifest), TokenIds(manifest)
    final_state = examine_answers(manifest, parts, answer_tokens=sum(r.output_tokens for r in reader.records))
    probe, broken = _probe_of(reader)
    others: tuple[Examination, ...] = (
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
    whole.files.see_manifest()
    for small in (manifest.samples, manifest.probe):
        if small is not None:
            whole.files.see_file(small)
    of_samples: tuple[Examination, ...] = (completeness, token_ids, *others)
    shared = parts_of(manifest)
    for shards, part in zip(shared, examined or (examine_shards(reader, shards) for shards in shared), strict=True):
        whole.join(part)
        for shard in shards:
            completeness.see_shard(reader, shard)
            token_ids.see_shard(reader, shard)
            for index in reader.samples_of(shard):
                try:
                    sample = reader.read(index)
                except DumpError as error:
                    whole.unread.setdefault(reader.records[index].id, str(error))
                    continue
                for examination in of_samples:
                    examination.see(sample)
                if on_progress is not None:
                    on_progress(index + 1, len(reader))
    attributed, attribution = check_attribution(reader, reference, why_none=why_no_reference)
    in_order: tuple[Examination, ...] = (whole.content, completeness, token_ids, whole.norms, *others)
    seen = [check for examination in in_order for check in examination.conclude()]
    return EvidenceReport(
        dump_sha256=manifest.digest(),
        checks=(
            *whole.files.conclude(),
            check_capture_list(manifest),
            check_engine_ids(manifest),
            *_unless_unread(seen, whole.unread, len(reader)),
            attributed,
        ),
        statistics=whole.norms.statistics(),
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


def _unless_unread(checks: list[Check], unread: Mapping[str, str], total: int) -> list[Check]:
    """A check that passed on a part of the dump did not pass. `unread`: why, by sample id."""
    if not unread:
        return checks
    findings = Findings()
    for sample, why in unread.items():
        findings.add(f"{sample!r}: {why}")
    reason = f"{total - len(unread)} of {total} samples could be read. Not read: {findings}"
    return [
        check
        if check.verdict == "fail"
        else check.model_copy(update={"verdict": "fail", "sentence": f"This check saw a part of the dump: {reason}."})
        for check in checks
    ]
