"""Benchmark: held-out prompts on SGLang without the drafter, with it, and with the same weights on wrong layers."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from eagle3.acceptance.definitions import RequestCounts, summarise
from eagle3.capture import CapturePoint
from eagle3.contract import DrafterContract
from eagle3.conventions import EngineIds, ids_of, points_of
from eagle3.errors import Eagle3Error
from eagle3.prompts import Prompt, TokenizedPrompt, load_prompts, split_prompts, tokenize
from infra.settings import Settings
from tasks.artifacts import fetch_checkpoint
from tasks.params import BenchmarkParams
from tasks.progress import StageProgress
from tasks.provenance import link_mlflow_run, prefect_run_url
from tasks.results import PLAIN, RIGHT, WRONG, ServedFigure
from tasks.serving import draft_config, log_path
from tasks.targets import fresh_folder, open_target

if TYPE_CHECKING:
    from eagle3.drafter.checkpoint import Checkpoint
    from eagle3.target import Target
    from infra.sglang.client import Generated, SglangClient

_LAYER_IDS = ("eagle_config", "eagle_aux_hidden_state_layer_ids")


class BenchmarkRefused(Eagle3Error):
    """A drafter that would be served otherwise than it was trained, or a text that is not the target's own."""


@dataclass(frozen=True)
class PromptFile:
    """Prompts of one file, ready to send."""

    name: str
    sha256: str
    prompts: tuple[TokenizedPrompt, ...]


@dataclass(frozen=True)
class Measured:
    """Every server's figures, and the prompt files that they were measured on."""

    served: tuple[ServedFigure, ...]
    files: tuple[PromptFile, ...]
    engine: dict[str, str]


@task(name="serve and measure", cache_policy=NO_CACHE)
def serve_and_measure(params: BenchmarkParams, settings: Settings) -> Measured:
    """One server after the other on the same prompts, so that none takes the other's cores."""
    target = open_target(params.target, settings)
    drafter, checkpoint = fetch_checkpoint(params.checkpoint, settings)
    contract = checkpoint.contract
    check_contract(checkpoint, target)
    files = _prompt_files(params, target)
    heldout, also = files[0], files[1:]
    wrong_prompts = heldout.prompts[: params.mismatch.num_prompts] if params.mismatch else ()
    total = 2 * len(heldout.prompts) + sum(len(file.prompts) for file in also) + len(wrong_prompts)
    work = fresh_folder(settings, "staging", "benchmark")
    try:
        with StageProgress("benchmark", "answers") as progress:
            progress.begin("starting", total=total)
            bench = _Bench(params, settings, target, progress)
            plain = bench.serve(PLAIN, None, [heldout])[0]
            bench.expected = {prompt.id: answer.output_ids for prompt, answer in plain.answers}
            right = bench.serve(RIGHT, drafter, files)
            served = [plain.figure, *(run.figure for run in right)]
            if params.mismatch:
                folder = with_layers(
                    drafter, work / "wrong", params.mismatch.points, checkpoint.engine_ids, target.num_layers
                )
                chosen = PromptFile(heldout.name, heldout.sha256, wrong_prompts)
                wrong = bench.serve(WRONG, folder, [chosen], params.mismatch.points)
                served.append(wrong[0].figure)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Measured(tuple(_with_points(figure, contract) for figure in served), files, bench.engine)


def check_contract(checkpoint: "Checkpoint", target: "Target") -> None:
    """Before the first prompt: the target is the contract's, and the layer ids mean the contract's points."""
    contract, ids = checkpoint.contract, checkpoint.engine_ids
    if target.identity() != contract.target:
        raise BenchmarkRefused(
            f"the drafter was trained for {contract.target.name} (weights {contract.target.weights_sha256[:16]}), the "
            f"target here has weights {target.identity().weights_sha256[:16]}"
        )
    served = points_of(ids, target.num_layers)
    if served != contract.capture.aux:
        raise BenchmarkRefused(
            f"the drafter was trained on {', '.join(contract.capture.aux)}; its config.json asks for {list(ids.ids)}, "
            f"which captures {', '.join(served)} on {ids.model_class} in SGLang {ids.version}"
        )


def with_layers(folder: Path, copy: Path, points: Sequence[CapturePoint], served: EngineIds, num_layers: int) -> Path:
    """The same weights with another layer list in config.json: the mistake, made on purpose."""
    ids = ids_of(
        points, engine=served.engine, version=served.version, model_class=served.model_class, num_layers=num_layers
    )
    if len(ids.ids) != len(served.ids):
        raise BenchmarkRefused(f"a mismatch needs {len(served.ids)} points, as many as the drafter; got {len(ids.ids)}")
    copy.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config[_LAYER_IDS[0]][_LAYER_IDS[1]] = list(ids.ids)
    (copy / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (copy / "model.safetensors").symlink_to(folder / "model.safetensors")
    return copy


@dataclass(frozen=True)
class _Run:
    figure: ServedFigure
    answers: tuple[tuple[TokenizedPrompt, "Generated"], ...]


@dataclass
class _Bench:
    params: BenchmarkParams
    settings: Settings
    target: "Target"
    progress: StageProgress
    expected: dict[str, tuple[int, ...]] | None = None
    engine: dict[str, str] = field(default_factory=dict)

    def serve(
        self,
        label: str,
        drafter: Path | None,
        files: Sequence[PromptFile],
        points: tuple[CapturePoint, ...] | None = None,
    ) -> list[_Run]:
        """Start a server, answer every file's prompts, end it."""
        from infra.sglang.server import start_server

        self.progress.note(f"{label}: SGLang starts")
        config = draft_config(self.params, self.target.path, drafter)
        name = "benchmark-" + label.replace(" ", "-").replace(",", "")
        with start_server(config, settings=self.settings, log_path=log_path(self.settings, name)) as server:
            info = server.client.server_info()
            self.engine = {"engine_version": info.version, "dtype": str(info.dtype), "device": str(info.device)}
            self.progress.begin(label)
            return [self._answer(label, server.client, file, points, drafting=drafter is not None) for file in files]

    def _answer(
        self,
        label: str,
        client: "SglangClient",
        file: PromptFile,
        points: tuple[CapturePoint, ...] | None,
        *,
        drafting: bool,
    ) -> _Run:
        from infra.sglang.client import GenerateRequest

        # The first requests of a server pay for what is made once; they are not counted.
        warm = [GenerateRequest(rid=f"warm-{n}", input_ids=file.prompts[0].input_ids, max_new_tokens=4) for n in (0, 1)]
        client.generate_many(warm, streams=2)
        most = self.params.answers.max_new_tokens
        requests = [
            GenerateRequest(rid=f"bench-{n:06d}", input_ids=prompt.input_ids, max_new_tokens=most)
            for n, prompt in enumerate(file.prompts)
        ]
        start = time.monotonic()
        answers = client.generate_many(
            requests, streams=self.params.serving.streams, on_done=lambda _answer: self.progress.advance()
        )
        seconds = time.monotonic() - start
        return _Run(
            figure=ServedFigure(
                label=label,
                points=points,
                prompts=file.name,
                num_prompts=len(answers),
                tokens_per_second=sum(len(answer.output_ids) for answer in answers) / seconds,
                acceptance=summarise([_counts(answer) for answer in answers], self.params.spec) if drafting else None,
                same_text=self._same_text(file, answers),
            ),
            answers=tuple(zip(file.prompts, answers, strict=True)),
        )

    def _same_text(self, file: PromptFile, answers: "Sequence[Generated]") -> int | None:
        """Answers that equal plain greedy decoding's; None where the plain server did not answer these prompts."""
        expected = self.expected
        if expected is None or any(prompt.id not in expected for prompt in file.prompts):
            return None
        return sum(
            expected[prompt.id] == answer.output_ids for prompt, answer in zip(file.prompts, answers, strict=True)
        )


def _counts(answer: "Generated") -> RequestCounts:
    """Per-request counts; an answer of one token had no verification."""
    if answer.spec is None:
        return RequestCounts(verifications=0, correct=0, proposed=0)
    return RequestCounts(
        verifications=answer.spec.verify_ct,
        correct=answer.spec.num_correct_drafts,
        proposed=answer.spec.num_proposed_drafts,
        histogram=answer.spec.correct_drafts_histogram,
    )


def _with_points(figure: ServedFigure, contract: DrafterContract) -> ServedFigure:
    return figure.model_copy(update={"points": contract.capture.aux}) if figure.label == RIGHT else figure


def _prompt_files(params: BenchmarkParams, target: "Target") -> tuple[PromptFile, ...]:
    loaded = load_prompts(Path(params.prompts.file))
    _, heldout = split_prompts(
        loaded, num_train=params.prompts.num_train, num_heldout=params.prompts.num_heldout, seed=params.prompts.seed
    )
    files = [PromptFile(f"{loaded.name} (held out)", loaded.sha256, _tokens(heldout, params, target))]
    for name in params.also:
        more = load_prompts(Path(name))
        files.append(PromptFile(more.name, more.sha256, _tokens(more.prompts[: params.also_prompts], params, target)))
    return tuple(files)


def _tokens(prompts: Sequence[Prompt], params: BenchmarkParams, target: "Target") -> tuple[TokenizedPrompt, ...]:
    return tuple(
        tokenize(
            prompts,
            target.tokenizer(),
            context_length=target.context_length,
            max_new_tokens=params.answers.max_new_tokens,
        )
    )


@task(name="record benchmark", retries=2, retry_delay_seconds=3, cache_policy=NO_CACHE)
def record_benchmark(params: BenchmarkParams, measured: Measured, settings: Settings) -> str:
    """The figures in MLflow, against the drafter and each prompt file; the table on the run's page."""
    from infra.lineage import Lineage, PromptSet

    create_table_artifact(
        key="acceptance", table=[_row(figure) for figure in measured.served], description="Acceptance"
    )
    lineage = Lineage(settings.mlflow_uri())
    model_id = params.model_id or lineage.find_drafter(params.checkpoint.sha256)
    run_ids = []
    for file in measured.files:
        figures: dict[str, float] = {}
        for served in measured.served:
            if served.prompts == file.name:
                figures |= _metrics(served)
        run_ids.append(
            lineage.record_benchmark(
                model_id,
                figures,
                prompts=PromptSet(name=file.name, sha256=file.sha256),
                settings=params.spec,
                params={"max_new_tokens": params.answers.max_new_tokens, "engine": "sglang", **measured.engine},
                prefect_url=prefect_run_url(),
            )
        )
    link_mlflow_run(lineage, run_ids[0], "benchmark")
    return run_ids[0]


def _row(figure: ServedFigure) -> dict[str, object]:
    acceptance = figure.acceptance
    return {
        "served": figure.label,
        "captured layers": ", ".join(figure.points or ()),
        "prompts": f"{figure.num_prompts} {figure.prompts}",
        "acceptance length": f"{acceptance.length:.3f}" if acceptance else "",
        "acceptance rate": f"{acceptance.rate:.1%}" if acceptance else "",
        "accepted by position": " ".join(f"{u:.0%}" for u in acceptance.unconditional) if acceptance else "",
        "tokens/s": f"{figure.tokens_per_second:.0f}",
        "same text": f"{figure.same_text} of {figure.num_prompts}" if figure.same_text is not None else "",
    }


def _metrics(served: ServedFigure) -> dict[str, float]:
    prefix = {PLAIN: "plain", RIGHT: "drafter", WRONG: "wrong_layers"}[served.label]
    metrics = {f"{prefix}.tokens_per_second": served.tokens_per_second, f"{prefix}.prompts": float(served.num_prompts)}
    if served.same_text is not None:
        metrics[f"{prefix}.same_text"] = float(served.same_text)
    if served.acceptance:
        metrics[f"{prefix}.acceptance_length"] = served.acceptance.length
        metrics[f"{prefix}.acceptance_rate"] = served.acceptance.rate
        for position, share in enumerate(served.acceptance.unconditional, start=1):
            metrics[f"{prefix}.accepted_at_{position}"] = share
    return metrics
