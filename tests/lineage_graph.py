"""A small made-up but valid pipeline result for the lineage's tests: every digest is right, no tensor exists."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3.acceptance.definitions import SpecSettings
from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.contract import DrafterContract
from eagle3.conventions import ids_of
from eagle3.conventions.sglang import boundaries
from eagle3.digests import sha256_bytes
from eagle3.dump.manifest import (
    EngineRecord,
    FileEntry,
    Generation,
    LiveCapture,
    Manifest,
    ShardEntry,
    TargetIdentity,
    TokenizerIdentity,
    spec_digest,
)
from eagle3.evidence.report import Check, EvidenceReport, PointStatistics
from eagle3.refs import CheckpointRef, DumpRef
from infra.lineage import Lineage, PromptSet, TrainingRecord

POINTS = tuple(CapturePoint(f"layers.{i}") for i in (2, 30, 58))
SPEC = CaptureSpec(aux=POINTS)
PREFECT = "http://127.0.0.1:4200/runs/flow-run/{}"
SETTINGS = SpecSettings.chain(3)


def digest(*parts: Any) -> str:
    """A sha256 that nothing else has."""
    return sha256_bytes("/".join(map(str, parts)).encode())


def make_manifest(seed: str, *, flags: dict[str, Any] | None = None) -> Manifest:
    """A Kimi-shaped dump: SGLang is sent [3, 31, 59] for layers 2, 30, 58."""
    model_class, layers, version = "KimiK25ForConditionalGeneration", 61, "0.5.23"
    target = TargetIdentity(
        name="moonshotai/Kimi-K2.5",
        revision="main",
        model_class=model_class,
        num_layers=layers,
        hidden_size=7168,
        vocab_size=163840,
        config_sha256=digest(seed, "config"),
        weights_sha256=digest(seed, "target weights"),
    )
    tokenizer = TokenizerIdentity(sha256=digest("tokenizer"), remote_code=True)
    generation = Generation(source="answer_then_prefill", max_new_tokens=96)
    ids = ids_of(POINTS, engine="sglang", version=version, model_class=model_class, num_layers=layers)
    live = LiveCapture(
        model_class="DeepseekV3ForCausalLM",
        layers_to_capture=boundaries(version, model_class, layers, ids.ids),
        tap_version="1",
    )
    return Manifest(
        created_at=datetime(2026, 11, 29, 17, tzinfo=UTC),
        spec=SPEC,
        spec_digest=spec_digest(SPEC, target, tokenizer, digest("prompts"), generation),
        content_digest=digest(seed, "content"),
        dtype="bfloat16",
        target=target,
        tokenizer=tokenizer,
        engine=EngineRecord(version=version, ids=ids, live=live, flags=flags or {"disable_radix_cache": True}),
        prompts_sha256=digest("prompts"),
        generation=generation,
        num_samples=100,
        num_tokens=12_345,
        shards=(
            ShardEntry(
                name="shard-00000.safetensors", bytes=2**30, sha256=digest(seed, "shard"), samples=100, tokens=12_345
            ),
        ),
        samples=FileEntry(name="samples.jsonl", bytes=4096, sha256=digest(seed, "samples")),
        packages={"torch": "2.13.0"},
        git_commit="0" * 40,
    )


@dataclass(frozen=True)
class Graph:
    """The values that the stages of one pipeline run hand to the lineage."""

    seed: str
    manifest: Manifest
    ref: DumpRef
    report: EvidenceReport
    contract: DrafterContract
    checkpoint: CheckpointRef
    folder: Path
    prompts: PromptSet

    @property
    def name(self) -> str:
        return f"eagle3-{self.seed}"

    def extraction(self, lineage: Lineage) -> str:
        return lineage.record_extraction(
            self.ref, self.manifest, prefect_url=PREFECT.format("extract"), metrics={"tokens_per_second": 410.5}
        )

    def validation(self, lineage: Lineage, plots: tuple[Path, ...] = ()) -> str:
        return lineage.record_validation(self.ref, self.report, list(plots), prefect_url=PREFECT.format("validate"))

    def training(self, lineage: Lineage, **changes: Any) -> TrainingRecord:
        given: dict[str, Any] = {
            "params": {"learning_rate": 2e-3, "num_unroll_steps": 3},
            "history": [{"step": step, "loss": 1 / (1 + step), "top1": [0.5, 0.4, 0.3]} for step in range(20)],
            "metrics": {"simulated_length": 1.7},
            "prefect_url": PREFECT.format("train"),
        }
        return lineage.record_training(
            self.ref, self.manifest, self.contract, self.checkpoint, self.folder, **(given | changes)
        )

    def benchmark(self, lineage: Lineage, model_id: str, length: float = 1.853) -> str:
        return lineage.record_benchmark(
            model_id,
            {"acceptance_length": length, "acceptance_rate": (length - 1) / 3, "unconditional": (0.5, 0.25, 0.1)},
            settings=SETTINGS,
            prompts=self.prompts,
            params={"engine": "sglang 0.5.23"},
            prefect_url=PREFECT.format("benchmark"),
        )

    def register(self, lineage: Lineage, record: TrainingRecord, alias: str | None = "champion") -> str:
        return lineage.register(
            self.name, record, tags={"acceptance_length": "1.853"}, description="A drafter.", alias=alias
        )


def make_graph(seed: str, folder: Path, **manifest: Any) -> Graph:
    """A graph whose digests nobody else has; `folder` receives the checkpoint's files."""
    made = make_manifest(seed, **manifest)
    ref = DumpRef(uri=f"s3://eagle3/dumps/{seed}", sha256=made.digest())
    report = EvidenceReport(
        dump_sha256=ref.sha256,
        checks=(
            Check(name="finite", verdict="pass", value="0 rows", threshold="0 rows", sentence="All states are finite."),
            Check(name="norms", verdict="warn", value="3.1x", threshold="3x", sentence="A norm is large."),
        ),
        statistics=tuple(
            PointStatistics(
                point=point,
                rows=12_345,
                nonfinite_rows=0,
                mean_norm=10.0 + i,
                std_norm=1,
                min_norm=8,
                max_norm=20,
                p05_norm=9,
                median_norm=10,
                p95_norm=15,
                mean_rms=0.1,
            )
            for i, point in enumerate(SPEC.points)
        ),
        created_at=datetime(2026, 11, 29, 18, tzinfo=UTC),
    )
    contract = DrafterContract(
        architecture="LlamaForCausalLMEagle3",
        capture=made.spec,
        target=made.target,
        tokenizer=made.tokenizer,
        dump_uri=ref.uri,
        dump_sha256=ref.sha256,
        report_sha256=report.digest(),
        draft_vocab_size=4096,
        vocab_map_sha256=digest(seed, "vocab"),
        weights_sha256=digest(seed, "drafter weights"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "contract.json").write_bytes(contract.canonical())
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    (folder / "model.safetensors").write_bytes(b"weights of " + seed.encode())
    return Graph(
        seed=seed,
        manifest=made,
        ref=ref,
        report=report,
        contract=contract,
        checkpoint=CheckpointRef(uri=f"s3://eagle3/drafters/{seed}", sha256=contract.digest()),
        folder=folder,
        prompts=PromptSet(name="word-problems/heldout", sha256=digest("heldout prompts")),
    )
