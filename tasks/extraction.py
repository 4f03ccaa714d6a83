"""Extraction: prompts are answered by SGLang, the tap's rows become shards, the manifest is written last."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from eagle3.conventions import EngineIds
from eagle3.dump.manifest import MANIFEST_NAME, EngineRecord, FileEntry, Generation, Manifest, spec_digest
from eagle3.prompts import TokenizedPrompt
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import Store, open_store
from tasks.capture_session import CaptureRefused, Session, check_server, check_weights
from tasks.inputs import (
    bytes_per_token,
    check_lengths,
    check_room,
    most_bytes,
    prompt_parts,
    prompts_sha256,
    resolve_ids,
    states_dtype,
    tell_ignored,
    touch_store,
)
from tasks.params import ExtractParams
from tasks.probe import NoProbe
from tasks.progress import StageProgress
from tasks.provenance import git_commit, package_versions, prefect_run_url
from tasks.serving import capture_config, log_path
from tasks.targets import fresh_folder, open_target

if TYPE_CHECKING:
    from eagle3.dump.probe import Probe
    from eagle3.dump.writer import DumpFiles
    from eagle3.target import Target
    from infra.sglang.server import SglangServer


@dataclass(frozen=True)
class Captured:
    """A committed dump."""

    ref: DumpRef
    manifest: Manifest

    def metrics(self) -> dict[str, float]:
        manifest = self.manifest
        num_bytes = sum(shard.bytes for shard in manifest.shards)
        return {"samples": float(manifest.num_samples), "tokens": float(manifest.num_tokens), "bytes": float(num_bytes)}


@task(name="capture", cache_policy=NO_CACHE)
def capture_dump(params: ExtractParams, settings: Settings) -> Captured:
    """Serve the target, capture every prompt, commit the dump."""
    work = fresh_folder(settings, "staging", params.name)
    try:
        with StageProgress("extract", "prompts") as progress:
            return _capture(params, settings, work, progress)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _capture(params: ExtractParams, settings: Settings, work: Path, progress: StageProgress) -> Captured:
    touch_store(open_store(settings.store, settings))
    target = open_target(params.target, settings, progress.note)
    train, heldout = prompt_parts(params.prompts, params.answers, target)  # the benchmark's prompts must fit too
    tell_ignored(train, heldout)
    per_token = bytes_per_token(params.capture, target.hidden_size, states_dtype(params.serving, target, settings))
    bound = most_bytes(train.prompts, params.answers.max_new_tokens, per_token)
    check_room(work, bound + min(bound, params.shard_mib * 2**20))  # every row once, and a shard on its way
    with _serving(params, target, settings, work, progress) as (server, ids, staging):
        check_room(staging, bound)  # an attached server's may be another disk
        info = server.client.server_info()
        check_weights(info, server.client.model_info(), target)
        source = check_server(info, ids, params.answers.source)
        most = params.answers.max_new_tokens
        check_lengths(info, train.prompts, most, read_again=source == "answer_then_prefill")
        session = Session(params, target, ids, staging, server.client)
        live = session.check_live_model(train.prompts[0])
        probe = _probe(session, train.prompts, progress)
        generation = Generation(source=source, max_new_tokens=params.answers.max_new_tokens)
        asked = _Asked(params, target, train.prompts, generation)
        uri = f"{settings.store}/dumps/{params.name}/{datetime.now(UTC):%Y%m%d-%H%M%S}-{asked.digest()[:8]}"
        store = open_store(uri, settings)
        files = session.capture(train.prompts, source, work / "shards", store, progress)
    progress.note("the manifest is written")
    flags = info.model_dump(mode="json", exclude_none=True)
    entry = _keep_probe(probe, work / "shards", store)
    manifest = asked.manifest(files, EngineRecord(version=ids.version, ids=ids, live=live, flags=flags), entry)
    store.put_file(files.samples.name, work / "shards" / files.samples.name, sha256=files.samples.sha256)
    store.put_bytes(MANIFEST_NAME, manifest.canonical(), if_absent=True)
    return Captured(DumpRef(uri=uri, sha256=manifest.digest()), manifest)


def _probe(session: Session, prompts: Sequence[TokenizedPrompt], progress: StageProgress) -> "Probe | None":
    """The probe of this server; None, and a warning, where it cannot be probed as it runs: validation says so too."""
    progress.note("the live model is probed")
    try:
        return session.probe(prompts)
    except NoProbe as error:
        get_run_logger().warning("the dump will have no probe: %s", error)
        return None


def _keep_probe(probe: "Probe | None", folder: Path, store: Store) -> FileEntry | None:
    from eagle3.dump.probe import PROBE_NAME, write_probe

    if probe is None:
        return None
    entry = write_probe(folder / PROBE_NAME, probe)
    store.put_file(entry.name, folder / entry.name, sha256=entry.sha256)
    return entry


@contextmanager
def _serving(
    params: ExtractParams, target: "Target", settings: Settings, work: Path, progress: StageProgress
) -> "Iterator[tuple[SglangServer, EngineIds, Path]]":
    """A server, the ids that it should capture, and its staging folder. One that was attached to is left running."""
    from infra.sglang.installed import sglang_version
    from infra.sglang.server import attach, start_server

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
    config = capture_config(params, target.path, ids, work / "tap")
    progress.note("SGLang starts")
    log = log_path(settings, f"extract-{params.name}")
    with start_server(config, settings=settings, log_path=log, on_wait=progress.wait("SGLang starts")) as server:
        yield server, ids, work / "tap"


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
            shards=files.shards,
            samples=files.samples,
            probe=probe,
            packages=package_versions(),
            git_commit=git_commit(),
        )


@task(name="record extraction", retries=2, retry_delay_seconds=3, cache_policy=NO_CACHE)
def record_extraction(captured: Captured, settings: Settings) -> str:
    """The extraction's MLflow run and the dump as its output; links on the run's page."""
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
        captured.ref, manifest, prefect_url=prefect_run_url(), metrics=captured.metrics()
    )
    link_mlflow_run(lineage, run_id, "extraction")
    return run_id
