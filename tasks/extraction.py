"""Extraction: prompts are answered by SGLang, the tap's rows become shards, the manifest is written last.

A killed one goes on where it was (`tasks.resume`); what is known to be done stands in its journal (`tasks.journal`).
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from eagle3.conventions import EngineIds
from eagle3.dump.manifest import (
    MANIFEST_NAME,
    SAMPLES_NAME,
    EngineRecord,
    FileEntry,
    Generation,
    Manifest,
    spec_digest,
)
from eagle3.prompts import TokenizedPrompt
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import StoreError, open_store
from tasks.answer_log import ANSWERS_NAME
from tasks.capture_session import CaptureRefused, Session, check_server, check_weights
from tasks.inputs import (
    ROW_BYTES,
    bytes_per_token,
    check_lengths,
    most_bytes,
    partitioned,
    prompt_parts,
    prompts_sha256,
    resolve_ids,
    states_dtype,
    tell_ignored,
    touch_store,
)
from tasks.journal import JournalError, Served, partition_mark
from tasks.params import ExtractParams, PartitionParams
from tasks.planning import announce_extraction
from tasks.probe import NoProbe
from tasks.progress import StageProgress
from tasks.provenance import git_commit, package_versions, prefect_run_url
from tasks.resume import (
    Extraction,
    Heartbeat,
    abandon,
    asked_for,
    begin,
    begin_partition,
    check_same_server,
    end,
)
from tasks.room import refuse_lacking, staging_room
from tasks.serving import capture_config, log_path
from tasks.targets import open_target

if TYPE_CHECKING:
    from eagle3.dump.probe import Probe
    from eagle3.dump.writer import DumpFiles
    from eagle3.target import Target
    from infra.sglang.server import SglangServer
    from tasks.journal import ShardDone


@dataclass(frozen=True)
class Captured:
    """A committed dump."""

    ref: DumpRef
    manifest: Manifest
    extraction: Extraction
    partitions: tuple[str, ...] = ()  # a line on each, where the extraction was split

    @classmethod
    def of(cls, extraction: Extraction, manifest: Manifest, partitions: Sequence[str] = ()) -> Self:
        ref = DumpRef(uri=extraction.uri, sha256=manifest.digest())
        return cls(ref, manifest, extraction, tuple(partitions))

    def metrics(self) -> dict[str, float]:
        manifest = self.manifest
        num_bytes = sum(shard.bytes for shard in manifest.shards)
        return {"samples": float(manifest.num_samples), "tokens": float(manifest.num_tokens), "bytes": float(num_bytes)}


@task(name="capture", cache_policy=NO_CACHE)
def capture_dump(params: ExtractParams, settings: Settings) -> Captured:
    """Serve the target, capture every prompt that an earlier try has not, commit the dump."""
    with StageProgress("extract", "prompts") as progress:
        wanted = Wanted.of(params, settings, progress)
        extraction = begin(params, wanted.asked, settings, progress.note)
        if extraction.committed:
            progress.note("the dump is committed already")
            return Captured.of(extraction, extraction.committed)
        with owned(wanted, extraction, settings, progress) as job:
            return Captured.of(extraction, commit(job, *_capture(job, settings, wanted.dtype)))


@task(name="capture a partition", cache_policy=NO_CACHE)
def capture_partition(part: PartitionParams, settings: Settings) -> None:
    """Serve the target, capture the prompts of one part; what is stored is merged by the extraction that started it."""
    with StageProgress("partition", "prompts") as progress:
        params = part.extraction
        wanted = Wanted.of(params, settings, progress)
        prompts = partitioned(wanted.prompts, params.partitions, params.answers.max_new_tokens)[part.number]
        extraction = begin_partition(part, wanted.asked, prompts, settings, progress.note)
        if extraction.committed:
            progress.note("the dump is committed already")
            return
        part_of_it = replace(wanted, params=params.model_copy(update={"partitions": 1}), prompts=prompts)
        with owned(part_of_it, extraction, settings, progress) as job:
            _capture(job, settings, wanted.dtype)


@dataclass(frozen=True)
class Wanted:
    """What an extraction is to capture, as this worker finds it."""

    params: ExtractParams
    target: "Target"
    prompts: Sequence[TokenizedPrompt]
    dtype: str  # of the states
    asked: dict[str, Any]

    @classmethod
    def of(cls, params: ExtractParams, settings: Settings, progress: StageProgress) -> Self:
        touch_store(open_store(settings.store, settings))
        target = open_target(params.target, settings, progress.note)
        train, heldout = prompt_parts(params.prompts, params.answers, target)  # the benchmark's prompts must fit too
        tell_ignored(train, heldout)
        dtype = states_dtype(params.serving, target, settings)
        return cls(params, target, train.prompts, dtype, asked_for(params, target, train.prompts, dtype))


@dataclass(frozen=True)
class Job:
    """One extraction, or one partition, on this worker."""

    params: ExtractParams
    target: "Target"
    prompts: Sequence[TokenizedPrompt]
    extraction: Extraction
    work: Path  # of this extraction on this machine, whoever owns it
    progress: StageProgress


@contextmanager
def owned(wanted: Wanted, extraction: Extraction, settings: Settings, progress: StageProgress) -> Iterator[Job]:
    """Work on an extraction that was begun: it beats, and after a failure what the next try takes up stays."""
    for remark in extraction.remarks:
        get_run_logger().warning(remark)
    work = settings.root / "staging" / f"{wanted.params.name}-{extraction.tag}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        with Heartbeat(extraction):
            yield Job(wanted.params, wanted.target, wanted.prompts, extraction, work, progress)
    except BaseException:
        _tell_what_stays(work, extraction, settings)
        raise
    shutil.rmtree(work, ignore_errors=True)


def _capture(job: Job, settings: Settings, dtype: str) -> "tuple[Served, list[ShardDone]]":
    """The shards of the dump, all in the store, and the server that they come from."""
    params, extraction, served = job.params, job.extraction, job.extraction.journal.served()
    if served and len(extraction.done_ids) == len(job.prompts):  # killed after its last shard
        return served, list(extraction.done)
    from tasks.capture_run import Bounds, CaptureRun

    bounds = Bounds.of(
        params.staging_mib * 2**20,
        shard_bytes=params.shard_mib * 2**20,
        prompts=job.prompts,
        most=params.answers.max_new_tokens,
        row_bytes=bytes_per_token(params.capture, job.target.hidden_size, dtype) + ROW_BYTES,
    )
    per_token = bounds.row_bytes - ROW_BYTES
    to_do = [prompt for prompt in job.prompts if prompt.id not in extraction.done_ids]
    announce_extraction(params, to_do or job.prompts, per_token, settings, get_run_logger().info)
    most = most_bytes(job.prompts, params.answers.max_new_tokens, per_token)
    refuse_lacking(
        [staging_room(job.work, min(2 * most, bounds.staging_bytes))]
    )  # rows, and the shards that are made of them
    with _serving(job, settings) as (server, ids, staging):
        refuse_lacking(
            [staging_room(staging, min(most, bounds.staging_bytes))]
        )  # an attached server's may be another disk
        info = server.client.server_info()
        check_weights(info, server.client.model_info(), job.target)
        source = check_server(info, ids, params.answers.source)
        check_lengths(info, job.prompts, params.answers.max_new_tokens, read_again=source == "answer_then_prefill")
        session = Session(params, job.target, ids, staging, server.client, name=extraction.tag)
        live = session.check_live_model(job.prompts[0])
        engine = EngineRecord(
            version=ids.version, ids=ids, live=live, flags=info.model_dump(mode="json", exclude_none=True)
        )
        given = params.answers.given if source == "given" else None
        most_new = None if given else params.answers.max_new_tokens
        generation = Generation(source=source, max_new_tokens=most_new, given=given)
        if served:
            check_same_server(served, Served(engine=engine, generation=generation, probe=served.probe))
            _probe(job, session)  # the states that are added must be the right ones too
        else:
            served = Served(engine=engine, generation=generation, probe=_keep_probe(job, _probe(job, session)))
            extraction.journal.note_served(served)
        run = CaptureRun(session, extraction, job.prompts, source, job.work, job.progress, bounds)
        return served, run.run()


def commit(job: Job, served: Served, done: "Sequence[ShardDone]") -> Manifest:
    """Write the list of samples, then the manifest: only where none is, and only by the owner that still is one."""
    from eagle3.dump.writer import PackedShard, assemble

    extraction = job.extraction
    job.progress.note("the manifest is written")
    files = assemble(
        job.work,
        [PackedShard(shard.shard, shard.records) for shard in done],
        dtype=done[0].dtype,
        samples_name=extraction.claim.own_name(SAMPLES_NAME),
    )
    asked = _Asked(job.params, job.target, job.prompts, served.generation)
    manifest = asked.manifest(files, served.engine, served.probe)
    extraction.journal.check_still_mine(extraction.claim)
    extraction.store.put_file(files.samples.name, job.work / files.samples.name, sha256=files.samples.sha256)
    extraction.store.put_bytes(MANIFEST_NAME, manifest.canonical(), if_absent=True)
    return manifest


def _tell_what_stays(work: Path, extraction: Extraction, settings: Settings) -> None:
    """After a failure: what the next try takes up stays, here and in the store; anything else goes."""
    rows = sum(1 for _ in work.glob("tap/cap-*.safetensors"))
    if rows or (work / ANSWERS_NAME).exists():
        get_run_logger().error(
            "%d captured samples wait in %s for their shard: start the extraction again with the same parameters, and "
            "it goes on at %s",
            rows,
            work,
            extraction.uri,
        )
        return
    shutil.rmtree(work, ignore_errors=True)
    with suppress(StoreError, JournalError):  # what failed may be the store
        abandon(extraction, settings)


def _probe(job: Job, session: Session) -> "Probe | None":
    """The probe of this server; None, and a warning, where it cannot be probed as it runs: validation says so too."""
    job.progress.note("the live model is probed")
    try:
        return session.probe(job.prompts)
    except NoProbe as error:
        get_run_logger().warning("the dump will have no probe: %s", error)
        return None


def _keep_probe(job: Job, probe: "Probe | None") -> FileEntry | None:
    from eagle3.dump.probe import PROBE_NAME, write_probe

    if probe is None:
        return None
    entry = write_probe(job.work / job.extraction.claim.own_name(PROBE_NAME), probe)
    job.extraction.store.put_file(entry.name, job.work / entry.name, sha256=entry.sha256)
    return entry


@contextmanager
def _serving(job: Job, settings: Settings) -> "Iterator[tuple[SglangServer, EngineIds, Path]]":
    """A server, the ids that it should capture, and its staging folder. One that was attached to is left running."""
    from infra.sglang.installed import sglang_version
    from infra.sglang.server import attach, start_server

    params, target, progress = job.params, job.target, job.progress

    def ids_in(version: str) -> EngineIds:
        return resolve_ids(
            params.capture, version=version, model_class=target.model_class, num_layers=target.num_layers
        )

    serving = params.serving
    if serving.attach and serving.attach_staging:
        staging = Path(serving.attach_staging).expanduser().resolve()
        if not staging.is_dir():
            raise CaptureRefused(
                f"serving.attach_staging is {staging}, which is no folder of this machine: name the EAGLE3_TAP_DIR of "
                f"the server at {serving.attach} as this worker sees it"
            )
        with attach(serving.attach, settings=settings) as server:
            progress.note(f"attached to {serving.attach}")
            yield server, ids_in(server.client.server_info().version), staging
        return
    ids = ids_in(sglang_version(settings))
    staging = job.work / "tap"
    for record in staging.glob("live.*.json"):  # of the server of an earlier try
        record.unlink()
    config = capture_config(params, target.path, ids, staging)
    progress.note("SGLang starts")
    log = log_path(settings, f"extract-{params.name}{partition_mark(job.extraction.claim.partition)}")
    with start_server(config, settings=settings, log_path=log, on_wait=progress.wait("SGLang starts")) as server:
        yield server, ids, staging


@dataclass(frozen=True)
class _Asked:
    """What an extraction was asked for."""

    params: ExtractParams
    target: "Target"
    prompts: Sequence[TokenizedPrompt]
    generation: Generation

    def prompts_sha256(self) -> str:
        """Of the chosen prompts, in order. The file may hold more than was chosen."""
        return prompts_sha256(self.prompts)

    def digest(self) -> str:
        return spec_digest(
            self.params.capture,
            self.target.identity(),
            self.target.tokenizer_identity(),
            self.prompts_sha256(),
            self.generation,
        )

    def manifest(self, files: "DumpFiles", engine: EngineRecord, probe: FileEntry | None) -> Manifest:
        return Manifest(
            created_at=datetime.now(UTC),
            spec=self.params.capture,
            spec_digest=self.digest(),
            content_digest=files.content_digest,
            dtype=files.dtype,
            target=self.target.identity(),
            tokenizer=self.target.tokenizer_identity(),
            engine=engine,
            prompts_sha256=self.prompts_sha256(),
            generation=self.generation,
            num_samples=files.num_samples,
            num_tokens=files.num_tokens,
            num_cut=files.num_cut,
            shards=files.shards,
            samples=files.samples,
            probe=probe,
            packages=package_versions(),
            git_commit=git_commit(),
        )


@task(name="record extraction", retries=2, retry_delay_seconds=3, cache_policy=NO_CACHE)
def record_extraction(captured: Captured, settings: Settings) -> str:
    """The extraction's MLflow run and the dump as its output; links on the run's page; its journal is removed."""
    from prefect.artifacts import create_table_artifact

    from infra.lineage import Lineage
    from tasks.provenance import link_mlflow_run

    manifest = captured.manifest
    create_table_artifact(
        key="dump",
        table=[
            {
                "dump": captured.ref.uri,
                "captured": ", ".join(manifest.spec.points),
                "samples": manifest.num_samples,
                "tokens": manifest.num_tokens,
                "MB": round(sum(shard.bytes for shard in manifest.shards) / 1e6, 1),
                "layer ids": str(manifest.engine.ids),
                "live model captured": str(list(manifest.engine.live.layers_to_capture)),
            }
        ],
        description="The dump, and what the live model itself reported",
    )
    lineage = Lineage(settings.mlflow_uri())
    run_id = lineage.record_extraction(
        captured.ref,
        manifest,
        prefect_url=prefect_run_url(),
        metrics=captured.metrics(),
        partitions=captured.partitions,
    )
    link_mlflow_run(lineage, run_id, "extraction")
    try:
        end(captured.extraction, manifest, settings)
    except (StoreError, JournalError) as error:  # the dump is whole and recorded: what is left harms nobody
        get_run_logger().warning("the journal of the extraction could not be removed: %s", error)
    return run_id
