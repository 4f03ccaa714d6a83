"""Extraction: prompts are answered by SGLang, the tap's rows become shards, the manifest is written last."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prefect import task
from prefect.cache_policies import NO_CACHE

from eagle3.conventions import EngineIds, ids_of
from eagle3.conventions.sglang import live_points
from eagle3.digests import sha256_ids, sha256_json
from eagle3.dump.manifest import (
    MANIFEST_NAME,
    EngineRecord,
    Generation,
    LiveCapture,
    Manifest,
    ShardEntry,
    spec_digest,
)
from eagle3.errors import Eagle3Error
from eagle3.prompts import TokenizedPrompt, load_prompts, split_prompts, tokenize
from eagle3.refs import DumpRef
from infra.settings import Settings
from infra.store import Store, open_store
from tasks.params import ExtractParams
from tasks.progress import StageProgress
from tasks.provenance import git_commit, package_versions, prefect_run_url
from tasks.serving import capture_config, log_path
from tasks.targets import fresh_folder, open_target

if TYPE_CHECKING:
    from eagle3.dump.writer import CapturedSample, DumpFiles, DumpWriter
    from eagle3.target import Target
    from infra.sglang.client import Generated, SglangClient


class CaptureRefused(Eagle3Error):
    """The server would deliver other states than the ones asked for, or not all of them."""


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
    from infra.sglang.installed import sglang_version
    from infra.sglang.server import start_server

    target = open_target(params.target, settings, progress.note)
    params.capture.check_target(target.num_layers)
    prompts = _prompts(params, target)
    ids = ids_of(
        params.capture.aux,
        engine="sglang",
        version=sglang_version(settings),
        model_class=target.model_class,
        num_layers=target.num_layers,
    )
    config = capture_config(params, target.path, ids, work / "tap")
    progress.note("SGLang starts")
    with start_server(config, settings=settings, log_path=log_path(settings, f"extract-{params.name}")) as server:
        session = _Session(params, target, ids, work / "tap", server.client, progress)
        flags, source = session.check_server()
        live = session.check_live_model(prompts[0])
        asked = _Asked(params, target, prompts, Generation(source=source, max_new_tokens=params.answers.max_new_tokens))
        uri = f"{settings.store}/dumps/{params.name}/{datetime.now(UTC):%Y%m%d-%H%M%S}-{asked.digest()[:8]}"
        store = open_store(uri, settings)
        files = session.capture(prompts, source, work / "shards", store)
    progress.note("the manifest is written")
    manifest = asked.manifest(files, EngineRecord(version=ids.version, ids=ids, live=live, flags=flags))
    store.put_file(files.samples.name, work / "shards" / files.samples.name, sha256=files.samples.sha256)
    store.put_bytes(MANIFEST_NAME, manifest.canonical(), if_absent=True)
    return Captured(DumpRef(uri=uri, sha256=manifest.digest()), manifest)


@dataclass(frozen=True)
class _Asked:
    """What an extraction was asked for."""

    params: ExtractParams
    target: "Target"
    prompts: Sequence[TokenizedPrompt]
    generation: Generation

    def prompts_sha256(self) -> str:
        """Digest over the chosen prompts, in order: ids and tokens. The file may hold more than was chosen."""
        return sha256_json([[prompt.id, sha256_ids(prompt.input_ids)] for prompt in self.prompts])

    def digest(self) -> str:
        return spec_digest(
            self.params.capture,
            self.target.identity(),
            self.target.tokenizer_identity(),
            self.prompts_sha256(),
            self.generation,
        )

    def manifest(self, files: "DumpFiles", engine: EngineRecord) -> Manifest:
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
            packages=package_versions(),
            git_commit=git_commit(),
        )


def _prompts(params: ExtractParams, target: "Target") -> list[TokenizedPrompt]:
    train, _ = split_prompts(
        load_prompts(Path(params.prompts.file)),
        num_train=params.prompts.num_train,
        num_heldout=params.prompts.num_heldout,
        seed=params.prompts.seed,
    )
    return tokenize(
        train,
        target.tokenizer(),
        context_length=target.context_length,
        max_new_tokens=params.answers.max_new_tokens,
    )


@dataclass
class _Session:
    """One extraction on one running server."""

    params: ExtractParams
    target: "Target"
    ids: EngineIds
    staging: Path
    client: "SglangClient"
    progress: StageProgress

    def check_server(self) -> tuple[dict[str, object], Literal["while_answering", "answer_then_prefill"]]:
        """The server's own answer, before the first prompt: its flags, and how states may be captured."""
        from infra.sglang.info import capture_problems, decode_graphs_off

        info = self.client.server_info()
        problems = capture_problems(info, self.ids)
        if problems:
            raise CaptureRefused("this server would not deliver every state:\n- " + "\n- ".join(problems))
        wanted, off = self.params.answers.source, decode_graphs_off(info)
        if wanted == "while_answering" and not off:
            raise CaptureRefused(
                "capturing while answering needs decode graphs off: a Python hook does not run when a CUDA graph is "
                "replayed. Set serving.disable_decode_graphs, or answers.source to answer_then_prefill."
            )
        if wanted == "auto":
            wanted = "while_answering" if off else "answer_then_prefill"
        return info.model_dump(mode="json", exclude_none=True), wanted

    def check_live_model(self, prompt: TokenizedPrompt) -> LiveCapture:
        """One request, and what the tap then says of the running model: its capture list against the one asked for."""
        from infra.sglang.staging import clear, read_live

        rid = "check-000000"
        self._answer([(rid, prompt.input_ids, 1, True)], lambda _answer: None)
        clear(self.staging, rid)
        live = read_live(self.staging)
        delivered = live_points(live.layers_to_capture, self.target.num_layers)
        if delivered != self.params.capture.aux:
            raise CaptureRefused(
                f"asked for {', '.join(self.params.capture.aux)} with ids {list(self.ids.ids)}, but the live "
                f"{live.model_class} captures {', '.join(delivered)} (layers_to_capture "
                f"{list(live.layers_to_capture)}): this build of SGLang means something else by these ids"
            )
        return LiveCapture(
            model_class=live.model_class, layers_to_capture=live.layers_to_capture, tap_version=live.tap_version
        )

    def capture(self, prompts: Sequence[TokenizedPrompt], source: str, folder: Path, store: Store) -> "DumpFiles":
        """Every prompt answered and captured; shards go to the store as they are full."""
        self.progress.begin("answering and capturing", total=len(prompts))
        from eagle3.dump.writer import DumpWriter

        def upload(path: Path, entry: ShardEntry) -> None:
            store.put_file(entry.name, path, sha256=entry.sha256)

        writer = DumpWriter(
            folder,
            self.params.capture,
            hidden_size=self.target.hidden_size,
            shard_bytes=self.params.shard_mib * 2**20,
            on_shard=upload,
        )
        if source == "while_answering":
            self._while_answering(prompts, writer)
        else:
            self._answer_then_prefill(prompts, writer)
        return writer.finish()

    def _while_answering(self, prompts: Sequence[TokenizedPrompt], writer: "DumpWriter") -> None:
        by_rid = {f"cap-{n:06d}": prompt for n, prompt in enumerate(prompts)}

        def take(answer: "Generated") -> None:
            writer.add(self._sample(by_rid[answer.rid], answer.rid, answer))
            self.progress.advance()

        most = self.params.answers.max_new_tokens
        self._answer([(rid, prompt.input_ids, most, True) for rid, prompt in by_rid.items()], take)

    def _answer_then_prefill(self, prompts: Sequence[TokenizedPrompt], writer: "DumpWriter") -> None:
        """Two passes: answers with decode graphs on; then prompt + answer read once, whose rows are prefill's."""
        by_rid = {f"ans-{n:06d}": prompt for n, prompt in enumerate(prompts)}
        answers: dict[str, Generated] = {}

        def keep(answer: "Generated") -> None:
            answers[answer.rid] = answer
            self.progress.advance(0.5)

        most = self.params.answers.max_new_tokens
        self._answer([(rid, prompt.input_ids, most, False) for rid, prompt in by_rid.items()], keep)

        def take(prefilled: "Generated") -> None:
            rid = f"ans-{prefilled.rid[4:]}"
            writer.add(self._sample(by_rid[rid], prefilled.rid, answers[rid]))
            self.progress.advance(0.5)

        texts = [
            (f"cap-{rid[4:]}", (*prompt.input_ids, *answers[rid].output_ids[:-1]), 1, True)
            for rid, prompt in by_rid.items()
        ]
        self._answer(texts, take)

    def _answer(
        self, requests: Sequence[tuple[str, Sequence[int], int, bool]], on_done: "Callable[[Generated], None]"
    ) -> None:
        """Send requests (rid, input ids, most new tokens, tapped); `on_done` runs in this thread, as each arrives."""
        from infra.sglang.client import GenerateRequest

        batch = [
            GenerateRequest(rid=rid, input_ids=tuple(ids), max_new_tokens=most, tap=tap)
            for rid, ids, most, tap in requests
        ]
        self.client.generate_many(batch, streams=self.params.serving.streams, on_done=on_done)

    def _sample(self, prompt: TokenizedPrompt, rid: str, answer: "Generated") -> "CapturedSample":
        """The staged rows of request `rid` as a sample of the dump; the staged file is removed."""
        from eagle3.dump.writer import CapturedSample
        from infra.sglang.staging import clear, read_staged, why_missing

        path = self.staging / f"{rid}.safetensors"
        if not path.exists():
            raise CaptureRefused(f"prompt {prompt.id}: no rows were captured: {why_missing(self.staging, rid)}")
        rows = read_staged(path, num_slots=len(self.params.capture.aux), hidden_size=self.target.hidden_size)
        sample = CapturedSample(
            id=prompt.id,
            input_ids=rows.input_ids,
            last_token_id=answer.output_ids[-1],
            prompt_tokens=len(prompt.input_ids),
            output_tokens=len(answer.output_ids),
            finish_reason=answer.finish_reason,
            states=dict(zip(self.params.capture.points, (*rows.aux, rows.final), strict=True)),
        )
        clear(self.staging, rid)
        return sample


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
