"""Probes of a running server: made, held against the target's own tensors, compared with another one."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from eagle3.capture import CapturePoint
from eagle3.conventions.sglang import live_points
from eagle3.errors import Eagle3Error
from eagle3.prompts import TokenizedPrompt
from infra.settings import Settings
from infra.store import open_store
from tasks.params import TargetParams

if TYPE_CHECKING:
    from eagle3.dump.probe import Probe, ProbedSequence
    from eagle3.evidence.nearest import Nearest
    from eagle3.evidence.report import Check
    from eagle3.target import Target
    from infra.sglang.client import Generated, SglangClient

_STREAMS = 6  # all sequences of a probe at once


class NoProbe(Eagle3Error):
    """A server that cannot be probed as it runs, or a dump without a probe."""


class SlotFinding(BaseModel):
    """One slot, or boundary, and what it is on the probe's sequences. Errors are medians over rows, relative L2."""

    model_config = ConfigDict(frozen=True)

    claimed: CapturePoint
    found: CapturePoint
    error: float
    runner_up: CapturePoint
    runner_up_error: float
    fits: bool


class ProbeComparison(BaseModel):
    """Two probes on the sequences that both have, boundary by boundary."""

    model_config = ConfigDict(frozen=True)

    other: str
    rows: int
    boundaries: tuple[SlotFinding, ...]
    other_slots: tuple[CapturePoint, ...] = Field(description="What the other one's slots claim, in order")
    agrees: bool
    sentence: str


class ProbeReport(BaseModel):
    """What a running server delivers, slot by slot."""

    model_config = ConfigDict(frozen=True)

    file: str
    engine: str
    model_class: str
    dtype: str
    verdict: str
    sentence: str
    slots: tuple[SlotFinding, ...]
    comparison: ProbeComparison | None = None

    @property
    def refuted(self) -> bool:
        return self.verdict == "fail" or (self.comparison is not None and not self.comparison.agrees)


@dataclass(frozen=True)
class _Asked:
    kind: str
    id: str
    input_ids: tuple[int, ...]


def take_probe(
    client: "SglangClient",
    staging: Path,
    target: "Target",
    captured: Sequence[CapturePoint],
    samples: Sequence[TokenizedPrompt] = (),
) -> "Probe":
    """The fixed texts and the beginnings of a few samples' prompts, with every boundary of the live model.

    `captured`: what the server's slots are called, in delivered order, and the final state. NoProbe with the tap's own
    reason where the server cannot be probed.
    """
    from eagle3.dump.probe import MAX_TOKENS, Probe, chosen_samples, fixed_texts
    from infra.sglang.client import GenerateRequest
    from infra.sglang.staging import read_live

    live = read_live(staging)
    if not live.probes:
        raise NoProbe(
            f"the server's tap is {live.tap_version}, which cannot see every boundary: install the one beside this "
            "software (pip install --no-deps ./infra/sglang/tap_dist) and start the server again"
        )
    heads = [samples[index] for index in chosen_samples(len(samples))]
    asked = [_Asked("text", name, tuple(ids)) for name, ids in fixed_texts(target.tokenizer()).items() if ids]
    asked += [_Asked("sample", prompt.id, tuple(prompt.input_ids[:MAX_TOKENS])) for prompt in heads]
    name = uuid.uuid4().hex[:12]
    by_rid = {f"probe-{name}-{number:03d}": sequence for number, sequence in enumerate(asked)}
    requests = [
        GenerateRequest(rid=rid, input_ids=sequence.input_ids, max_new_tokens=1, ignore_eos=True, tap="probe")
        for rid, sequence in by_rid.items()
    ]
    found: dict[str, ProbedSequence] = {}

    def take(answer: "Generated") -> None:
        found[answer.rid] = _staged(staging, answer.rid, by_rid[answer.rid], target, captured)

    client.generate_many(requests, streams=_STREAMS, on_done=take)
    return Probe.of(
        [found[rid] for rid in by_rid],
        captured,
        engine=f"sglang {live.sglang_version}",
        model_class=live.model_class,
        tap_version=live.tap_version,
    )


def _staged(
    staging: Path, rid: str, asked: _Asked, target: "Target", captured: Sequence[CapturePoint]
) -> "ProbedSequence":
    """One sequence as the tap published it; its file is removed."""
    from eagle3.capture import all_points
    from eagle3.dump.probe import ProbedSequence
    from infra.sglang.staging import StagingError, clear, read_staged, staged_path, why_missing

    path = staged_path(staging, rid)
    if not path.exists():
        raise NoProbe(f"the server cannot be probed as it runs: {why_missing(staging, rid)}")
    rows = read_staged(path, num_slots=len(captured) - 1, hidden_size=target.hidden_size, num_layers=target.num_layers)
    if rows.boundaries is None or tuple(rows.input_ids.tolist()) != asked.input_ids:
        raise StagingError(f"{path}: holds other tokens than were asked for")
    points = all_points(target.num_layers)
    kind: Any = asked.kind
    sequence = ProbedSequence(
        kind=kind,
        id=asked.id,
        input_ids=rows.input_ids,
        boundaries={point: rows.boundaries[:, place].clone() for place, point in enumerate(points)},
        captured=dict(zip(captured, (*rows.aux, rows.final), strict=True)),
    )
    clear(staging, rid)
    return sequence


def judge_probe(probe: "Probe", target: "Target") -> "Check":
    """Both ends of the probe against the target's own tensors, and every slot against every boundary."""
    from eagle3.evidence.probe_checks import check_probe

    return check_probe(
        probe, embedding=target.embedding(), final_norm=target.final_norm(), rms_norm_eps=target.rms_norm_eps
    )


def probe_server(
    url: str, staging: Path, target_params: TargetParams, out: Path, settings: Settings, *, compare: str | None = None
) -> ProbeReport:
    """Make a probe of a running server, keep it as `out`, and say what the server's slots are.

    `compare`: a probe's file, or a dump (a folder, or a URI) with one. NoProbe, StagingError, SglangError, DumpError,
    TargetError, ConventionError where it cannot be told.
    """
    from eagle3.dump.probe import write_probe
    from eagle3.evidence.probe_checks import delivered
    from infra.sglang.server import attach
    from infra.sglang.staging import read_live
    from tasks.targets import open_target

    target = open_target(target_params, settings)
    other = read_other(compare, settings) if compare else None
    with attach(url, settings=settings) as server:
        live = read_live(staging)
        if (live.num_layers, live.hidden_size) != (target.num_layers, target.hidden_size):
            raise NoProbe(
                f"the live model has {live.num_layers} layers of width {live.hidden_size}, {target.path} has "
                f"{target.num_layers} of width {target.hidden_size}: name the target that the server serves"
            )
        slots = live_points(
            live.layers_to_capture, live.num_layers, model_class=target.model_class, version=live.sglang_version
        )
        captured = (*slots, CapturePoint("norm"))
        probe = take_probe(server.client, staging, target, captured)
    write_probe(out, probe)
    check = judge_probe(probe, target)
    return ProbeReport(
        file=str(out),
        engine=probe.info.engine,
        model_class=probe.info.model_class,
        dtype=probe.info.dtype,
        verdict=check.verdict,
        sentence=check.sentence,
        slots=_findings(delivered(probe)),
        comparison=_compare(probe, other, compare) if other and compare else None,
    )


def read_other(where: str, settings: Settings) -> "Probe":
    """The probe in a file, or the one of a dump in a folder or at a URI. NoProbe where the dump has none."""
    from eagle3.dump.probe import read_probe
    from tasks.dumps import PublishedDump

    path = Path(where).expanduser()
    if "://" not in where and path.is_file():
        return read_probe(path)
    uri = where if "://" in where else path.resolve().as_uri()
    dump = PublishedDump(uri, open_store(uri, settings))
    probe = dump.probe(settings)
    if probe is None:
        raise NoProbe(f"the dump {where} has no probe: extract again, or compare with a probe's file")
    return probe


def _compare(probe: "Probe", other: "Probe", where: str) -> ProbeComparison:
    from eagle3.evidence.probe_checks import compare_probes

    found = compare_probes(probe, other)
    slots, theirs = probe.info.captured, other.info.captured
    moved = [boundary for boundary in found.boundaries if not (boundary.fits or boundary.untold)]
    if moved:
        first = moved[0]
        sentence = (
            f"{len(moved)} of {len(found.boundaries)} boundaries differ; {first.claimed} here is nearest to "
            f"{first.point} there (relative error {first.error:.2g}, to {first.claimed} {first.claimed_error:.2g}): "
            "other weights, another quantisation, or another model."
        )
    elif slots != theirs:
        sentence = (
            f"The models agree at every boundary, but the server's slots are {', '.join(slots)}, and there they are "
            f"{', '.join(theirs)}: the drafter would be given other layers."
        )
    else:
        sentence = "Every boundary agrees, and the slots are the same in the same order."
    return ProbeComparison(
        other=where,
        rows=found.rows,
        boundaries=_findings(found.boundaries),
        other_slots=theirs,
        agrees=not moved and slots == theirs,
        sentence=sentence,
    )


def _findings(found: "Sequence[Nearest]") -> tuple[SlotFinding, ...]:
    return tuple(
        SlotFinding(
            claimed=slot.claimed,
            found=slot.point,
            error=slot.error,
            runner_up=slot.runner_up,
            runner_up_error=slot.runner_up_error,
            fits=slot.fits,
        )
        for slot in found
    )
