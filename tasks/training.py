"""Training: a dump whose report passed -> a checkpoint with its contract in the store."""

import os
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from eagle3.conventions import ids_of
from eagle3.digests import sha256_json
from eagle3.errors import Eagle3Error
from eagle3.refs import CheckpointRef, DumpRef
from eagle3.training.config import RESUME_MAY_CHANGE
from infra.settings import Settings
from infra.store import MissingObject
from tasks.advice import few_samples
from tasks.artifacts import drafter_folder, keep, publish_checkpoint
from tasks.drafters import new_config, open_parent
from tasks.params import TrainParams
from tasks.progress import StageProgress
from tasks.provenance import link_mlflow_run, prefect_run_url
from tasks.targets import open_target, target_differences
from tasks.training_data import open_training_data
from tasks.validation import read_report

if TYPE_CHECKING:
    from eagle3.contract import DrafterContract
    from eagle3.dump.manifest import Manifest
    from eagle3.evidence.report import EvidenceReport
    from eagle3.target import Target
    from eagle3.training.run import Progress
    from eagle3.training.trainer import StepRecord
    from infra.lineage import TrainingRecord


class NoReport(Eagle3Error):
    """A dump that nobody validated, or that failed."""


class WrongTarget(Eagle3Error):
    """A dump of another target than the one that is trained for."""


@dataclass(frozen=True)
class Trained:
    """A published checkpoint and how it came about."""

    ref: CheckpointRef
    contract: "DrafterContract"
    manifest: "Manifest"
    folder: Path
    simulated_length: float | None
    steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    parent_weights_sha256: str | None = None


def require_report(dump: DumpRef, settings: Settings) -> "EvidenceReport":
    """The dump's passing report; NoReport where there is none, where it failed, or where it is stale."""
    from eagle3.evidence.standing import standing

    try:
        report = read_report(dump.sha256, settings)
    except MissingObject as error:
        raise NoReport(
            f"the dump {dump.uri} has no evidence report ({error}). Run the validate flow on it first; training on "
            "an unproven dump is refused."
        ) from None
    if report.dump_sha256 != dump.sha256 or report.verdict == "fail":
        failed = ", ".join(check.name for check in report.failed()) or "it is another dump's report"
        raise NoReport(f"the dump {dump.uri} did not pass its checks ({failed}); training on it is refused")
    stands = standing(report)
    if not stands.current:
        raise NoReport(
            f"the dump {dump.uri} has a stale evidence report, and training on it is refused: {stands.reason} (flow "
            "`validate`)."
        )
    return report


@task(name="train drafter", cache_policy=NO_CACHE)
def train_drafter(params: TrainParams, report: "EvidenceReport", settings: Settings) -> Trained:
    """Train, save, upload."""
    import torch

    from eagle3.drafter.checkpoint import checkpoint_tensors, contract_for, save_checkpoint, weights_digest
    from eagle3.drafter.config import MlaDrafterConfig
    from eagle3.drafter.vocab import VocabMap, count_tokens
    from eagle3.training.dump_samples import split
    from eagle3.training.loop import train
    from eagle3.training.run import Progress
    from eagle3.training.samples import TargetParts

    torch.set_num_threads(params.threads)
    data = open_training_data(params.dump, settings)
    manifest = data.reader.manifest
    target = open_target(params.target, settings)
    check_target(manifest, target)
    engine_ids = ids_of(
        manifest.spec.aux,
        engine="sglang",
        version=manifest.engine.version,
        model_class=target.model_class,
        num_layers=target.num_layers,
    )
    if note := data.streamed or slow_reading(sum(shard.bytes for shard in manifest.shards), memory_bytes()):
        get_run_logger().warning(note)
    samples, heldout = split(data.reader, params.heldout_samples, heldout_reader=data.heldout_reader)
    if heldout and manifest.generation.source == "given":
        get_run_logger().warning(
            "the dump's answers were given: the simulated acceptance says how well the drafter follows that text, not "
            "what the target would accept; the benchmark does"
        )
    counts = count_tokens(samples.tokens(), target.vocab_size)
    if params.parent:
        parent = open_parent(params.parent, manifest.spec.aux, target, settings)
        for remark in parent.notes:
            get_run_logger().warning(f"the parent drafter: {remark}")
        vocab, config, first = parent.vocab, parent.drafter.config, checkpoint_tensors(parent.drafter, parent.vocab)
    else:
        vocab = VocabMap.most_frequent(
            counts,
            min(params.drafter.draft_vocab_size, target.vocab_size),
            fill_from=count_tokens(((ids, ~mask) for ids, mask in samples.tokens()), target.vocab_size),
        )
        config = new_config(params.drafter, target, num_slots=len(manifest.spec.aux), draft_vocab_size=len(vocab))
        first = None
    if note := few_samples(len(samples)):
        get_run_logger().warning(note)
    same = params.model_dump(mode="json", exclude={"threads": True, "training": set(RESUME_MAY_CHANGE)})
    states = settings.root / "training" / sha256_json(same)[:32]
    with StageProgress("train", "percent") as progress:
        progress.begin("preparing", total=100)

        def show(now: Progress) -> None:
            at = {"prepare": 0.0, "train": 5.0, "evaluate": 95.0}[now.stage]
            width = {"prepare": 5.0, "train": 90.0, "evaluate": 5.0}[now.stage]
            progress.at(at + width * now.fraction, said(now), now.seconds_left if now.stage == "train" else None)

        result = train(
            samples,
            heldout,
            TargetParts.of(target, latent=isinstance(config, MlaDrafterConfig)),
            config,
            vocab,
            params.training,
            show,
            final=manifest.spec.final,
            device="cuda" if torch.cuda.is_available() else "cpu",
            order=samples.drawn_by(params.training.seed),
            read_ahead=data.read_ahead,
            states=states,
            parent=first,
        )
    contract = contract_for(
        result.drafter,
        vocab,
        capture=manifest.spec,
        target=manifest.target,
        tokenizer=manifest.tokenizer,
        dump=params.dump,
        report_sha256=report.digest(),
        report_check_set=report.check_set_version,
        report_thresholds_sha256=report.thresholds_digest(),
    )
    folder = keep(
        drafter_folder(contract.digest(), settings),
        lambda path: save_checkpoint(
            path, result.drafter, vocab, contract, engine_ids, coverage=vocab.coverage(counts)
        ),
    )
    shutil.rmtree(states, ignore_errors=True)
    uri = f"{settings.store}/drafters/{params.name}/{datetime.now(UTC):%Y%m%d-%H%M%S}-{contract.digest()[:8]}"
    coverage = vocab.coverage(count_tokens(heldout.tokens(), target.vocab_size))
    return Trained(
        ref=publish_checkpoint(folder, uri, contract, settings),
        contract=contract,
        manifest=manifest,
        folder=folder,
        simulated_length=result.acceptance.length if result.acceptance else None,
        steps=int(result.metrics["steps"]),
        metrics=result.metrics
        | {"vocab_coverage": vocab.coverage(counts)}
        | ({"heldout_vocab_coverage": coverage} if heldout else {}),
        history=[_figures(record) for record in result.history],
        parent_weights_sha256=weights_digest(first) if first else None,
    )


def check_target(manifest: "Manifest", target: "Target") -> None:
    """WrongTarget where the dump was captured from other weights, another config or another tokenizer."""
    if differences := target_differences(target, manifest.target, manifest.tokenizer):
        raise WrongTarget(
            f"the target {target.path} is not {manifest.target.name}, from which the dump was captured: "
            f"{'; '.join(differences)}. Train with the target of the dump, or extract from this one."
        )


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def slow_reading(dump_bytes: int, memory: int) -> str | None:
    """What to say of a dump that the memory cannot keep; None where it can, or nearly."""
    if dump_bytes < 0.8 * memory:
        return None
    return (
        f"the dump has {dump_bytes / 1e9:.1f} GB of states and this machine {memory / 1e9:.1f} GB of memory: every "
        "pass over the samples reads them from the disk again. A fast local disk under EAGLE3_HOME decides the pace."
    )


def said(now: "Progress") -> str:
    """A line of progress: the step, its loss, the pace, the acceptance where it was simulated."""
    if now.loss is None:
        return now.stage
    parts = [f"step {now.step}, loss {now.loss:.3f}"]
    if now.rows_per_second:
        parts.append(f"{now.rows_per_second:.0f} tokens/s")
    if now.heldout_length is not None:
        parts.append(f"held-out length {now.heldout_length:.2f}")
    return ", ".join(parts)


def _figures(record: "StepRecord") -> dict[str, float]:
    figures: dict[str, float] = {
        "step": record.step,
        "loss": record.loss,
        "learning_rate": record.learning_rate,
        "gradient_norm": record.gradient_norm,
        "rows_per_second": record.rows_per_second,
    }
    if record.heldout_length is not None:
        figures["heldout_acceptance_length"] = record.heldout_length
    for k, step in enumerate(record.steps, start=1):
        figures |= {f"loss_step{k}": step.loss, f"top1_step{k}": step.top1, f"acceptance_step{k}": step.acceptance}
    return figures


@task(name="record training", retries=2, retry_delay_seconds=3, cache_policy=NO_CACHE)
def record_training(params: TrainParams, trained: Trained, settings: Settings) -> "TrainingRecord":
    """The training run and its drafter in MLflow; a link on the run's page."""
    from infra.lineage import Lineage

    lineage = Lineage(settings.mlflow_uri())
    record = lineage.record_training(
        params.dump,
        trained.manifest,
        trained.contract,
        trained.ref,
        trained.folder,
        params={
            **params.training.model_dump(mode="json"),
            **params.drafter.model_dump(mode="json"),
            "parent": params.parent.drafter if params.parent else None,
            "parent_weights_sha256": trained.parent_weights_sha256,
        },
        history=trained.history,
        metrics=trained.metrics,
        prefect_url=prefect_run_url(),
    )
    link_mlflow_run(lineage, record.run_id, "training")
    return record
