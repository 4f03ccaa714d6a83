"""Benchmark: held-out prompts on SGLang without the drafter, with it, and with the same weights on wrong layers."""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from eagle3.acceptance.definitions import summarise
from eagle3.capture import CapturePoint
from eagle3.conventions import ConventionError, EngineIds, ids_of, points_of
from eagle3.errors import Eagle3Error
from eagle3.prompts import TokenizedPrompt
from infra.settings import Settings
from tasks.artifacts import fetch_checkpoint
from tasks.deployed import Seen, examine_server, reference_here
from tasks.inputs import PromptFile, check_lengths, further_prompts, named_apart, prompt_parts, tell_ignored
from tasks.params import BenchmarkParams
from tasks.progress import StageProgress
from tasks.provenance import link_mlflow_run, prefect_run_url
from tasks.results import PLAIN, RIGHT, WRONG, ServedFigure
from tasks.serving import draft_config, log_path
from tasks.standing import tell_standing
from tasks.targets import fresh_folder, open_target, target_differences
from tasks.variants import with_ids

if TYPE_CHECKING:
    from eagle3.drafter.checkpoint import Checkpoint
    from eagle3.evidence.attribution import Reference
    from eagle3.target import Target
    from infra.sglang.client import Generated, SglangClient

_SEEN_PROMPTS = 2  # whose delivered states are attributed


class BenchmarkRefused(Eagle3Error):
    """A drafter that would be served otherwise than it was trained, or a text that is not the target's own."""


@dataclass(frozen=True)
class Served:
    """A drafter's folder, the layer ids in its config.json, and the points that they must mean where it is served."""

    folder: Path
    ids: EngineIds
    points: tuple[CapturePoint, ...]


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
    tell_standing(contract, settings)
    files = _prompt_files(params, target)
    tell_ignored(*files)
    heldout, also = files[0], files[1:]
    subset = heldout.first(params.mismatch.num_prompts) if params.mismatch else None
    total = 2 * len(heldout.prompts) + sum(len(file.prompts) for file in also) + (len(subset.prompts) if subset else 0)
    work = fresh_folder(settings, "staging", "benchmark")
    try:
        with StageProgress("benchmark", "answers") as progress:
            progress.begin("starting", total=total)
            bench = _Bench(params, settings, target, checkpoint, work, progress)
            plain = bench.serve(PLAIN, None, [heldout])[0]
            bench.expected = {prompt.input_ids: answer.output_ids for prompt, answer in plain.answers}
            right = bench.serve(RIGHT, Served(drafter, checkpoint.engine_ids, contract.capture.aux), files)
            figures = [plain.figure, *(run.figure for run in right)]
            if params.mismatch and subset:
                wrong = with_layers(
                    drafter, work / "wrong", params.mismatch.points, checkpoint.engine_ids, bench.version, target
                )
                figure = bench.serve(WRONG, wrong, [subset])[0].figure
                same = right[0].answers[: len(subset.prompts)]
                paired = summarise([answer.counts for _, answer in same], params.spec)
                figures.append(figure.model_copy(update={"right_length": paired.length}))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    measured_on = files if subset is None or subset is heldout else (*files, subset)
    return Measured(tuple(figures), measured_on, bench.engine)


def check_contract(checkpoint: "Checkpoint", target: "Target") -> None:
    """Before a server starts: the target is the contract's, and the layer ids mean the contract's points."""
    contract, ids = checkpoint.contract, checkpoint.engine_ids
    if differences := target_differences(target, contract.target, contract.tokenizer):
        raise BenchmarkRefused(
            f"the target {target.path} is not {contract.target.name}, for which the drafter was trained: "
            f"{'; '.join(differences)}"
        )
    check_served(ids, ids.version, contract.capture.aux, target)


def check_served(ids: EngineIds, version: str, points: tuple[CapturePoint, ...], target: "Target") -> None:
    """Refuse a drafter whose layer ids mean other points on the SGLang that serves it than `points`."""
    serving = ids.model_copy(update={"version": version, "model_class": target.model_class})
    asked = f"the drafter's config.json asks SGLang {version} for {list(ids.ids)} on {target.model_class}"
    try:
        served = points_of(serving, target.num_layers)
    except ConventionError as error:
        raise BenchmarkRefused(f"{asked}, and what that captures is not known: {error}") from None
    if served == points:
        return
    try:
        right = ids_of(
            points, engine=ids.engine, version=version, model_class=target.model_class, num_layers=target.num_layers
        )
        mend = f"Right there: {list(right.ids)}. Export the drafter for SGLang {version}, or serve it on {ids.version}."
    except ConventionError as error:
        mend = f"{error}"
    raise BenchmarkRefused(
        f"{asked}, which captures {', '.join(served)}; it must be served {', '.join(points)} (its ids were written for "
        f"{ids.model_class} in SGLang {ids.version}). {mend}"
    )


def with_layers(
    folder: Path, copy: Path, points: tuple[CapturePoint, ...], ids: EngineIds, version: str, target: "Target"
) -> Served:
    """The same weights with another layer list in config.json: the mistake, made on purpose, for this SGLang."""
    wrong = ids_of(
        points, engine=ids.engine, version=version, model_class=target.model_class, num_layers=target.num_layers
    )
    if len(wrong.ids) != len(ids.ids):
        raise BenchmarkRefused(f"a mismatch needs {len(ids.ids)} points, as many as the drafter; got {len(wrong.ids)}")
    return Served(with_ids(folder, copy, wrong.ids), wrong, points)


@dataclass(frozen=True)
class _Run:
    figure: ServedFigure
    answers: tuple[tuple[TokenizedPrompt, "Generated"], ...]


@dataclass
class _Bench:
    params: BenchmarkParams
    settings: Settings
    target: "Target"
    checkpoint: "Checkpoint"
    work: Path
    progress: StageProgress
    expected: dict[tuple[int, ...], tuple[int, ...]] | None = None  # by the prompt's tokens: ids of two files may agree
    engine: dict[str, str] = field(default_factory=dict)

    @cached_property
    def reference(self) -> "Reference | None":
        return reference_here(self.target)

    @property
    def version(self) -> str:
        """Of the SGLang that served last."""
        return self.engine["engine_version"]

    def serve(self, label: str, drafter: Served | None, files: Sequence[PromptFile]) -> list[_Run]:
        """Start a server, answer every file's prompts, end it. No prompt is sent where the layer ids mean others."""
        from infra.sglang.server import start_server

        self.progress.note(f"{label}: SGLang starts")
        staging = self.work / f"tap-{label.replace(' ', '-').replace(',', '')}"
        config = draft_config(self.params, self.target.path, drafter.folder if drafter else None, staging)
        log = log_path(self.settings, "benchmark-" + label.replace(" ", "-").replace(",", ""))
        wait = self.progress.wait(f"{label}: SGLang starts")
        with start_server(config, settings=self.settings, log_path=log, on_wait=wait) as server:
            info = server.client.server_info()
            for file in files:
                check_lengths(info, file.prompts, self.params.answers.max_new_tokens)
            if drafter:
                check_served(drafter.ids, info.version, drafter.points, self.target)
            self.engine = {"engine_version": info.version, "dtype": str(info.dtype), "device": str(info.device)}
            self.progress.begin(label)
            runs = [self._answer(label, server.client, file, drafter) for file in files]
            if drafter:
                seen = self._examine(label, server.client, staging, files[0])
                runs = [replace(run, figure=run.figure.model_copy(update=_told(seen))) for run in runs]
            return runs

    def _examine(self, label: str, client: "SglangClient", staging: Path, file: PromptFile) -> Seen:
        """What this server really runs. The drafter as it was trained must give the contract check nothing to say."""
        self.progress.note(f"{label}: the server is held against the drafter's contract")
        seen = examine_server(
            client,
            self.checkpoint.contract,
            self.target,
            staging=staging,
            prompts=file.prompts[:_SEEN_PROMPTS] if self.params.spec.top_k == 1 else (),  # the tap takes chains only
            reference=self.reference,
        )
        if label == RIGHT and (seen.findings or seen.refuted()):
            told = " ".join((*map(str, seen.findings), *seen.refutations()))
            raise BenchmarkRefused(f"the server does not run the drafter as it was trained: {told}")
        return seen

    def _answer(self, label: str, client: "SglangClient", file: PromptFile, drafter: Served | None) -> _Run:
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
                points=drafter.points if drafter else None,
                prompts=file.name,
                num_prompts=len(answers),
                tokens_per_second=sum(len(answer.output_ids) for answer in answers) / seconds,
                acceptance=summarise([answer.counts for answer in answers], self.params.spec) if drafter else None,
                same_text=same_text(file, answers, self.expected),
            ),
            answers=tuple(zip(file.prompts, answers, strict=True)),
        )


def _told(seen: Seen) -> dict[str, tuple[str, ...]]:
    return {"findings": tuple(map(str, seen.findings)), "delivered": seen.delivered()}


def same_text(
    file: PromptFile, answers: "Sequence[Generated]", expected: Mapping[tuple[int, ...], tuple[int, ...]] | None
) -> int | None:
    """Answers that equal plain greedy decoding's (`expected`, by the prompt's tokens); None where it was not asked."""
    if expected is None or any(prompt.input_ids not in expected for prompt in file.prompts):
        return None
    return sum(
        expected[prompt.input_ids] == answer.output_ids for prompt, answer in zip(file.prompts, answers, strict=True)
    )


def _prompt_files(params: BenchmarkParams, target: "Target") -> tuple[PromptFile, ...]:
    _, heldout = prompt_parts(params.prompts, params.answers, target)
    also = (further_prompts(name, params.also_prompts, params.answers, target) for name in params.also)
    return named_apart((heldout, *also))


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
        "delivered, by the tensors": ", ".join(figure.delivered),
        "the contract check says": " ".join(figure.findings) or ("nothing" if figure.acceptance else ""),
    }


def _metrics(served: ServedFigure) -> dict[str, float]:
    prefix = {PLAIN: "plain", RIGHT: "drafter", WRONG: "wrong_layers"}[served.label]
    metrics = {f"{prefix}.tokens_per_second": served.tokens_per_second, f"{prefix}.prompts": float(served.num_prompts)}
    if served.same_text is not None:
        metrics[f"{prefix}.same_text"] = float(served.same_text)
    if served.acceptance:
        metrics[f"{prefix}.acceptance_length"] = served.acceptance.length
        metrics[f"{prefix}.acceptance_rate"] = served.acceptance.rate
        if served.right_length is not None:
            metrics[f"{prefix}.right_length"] = served.right_length
        for position, share in enumerate(served.acceptance.unconditional, start=1):
            metrics[f"{prefix}.accepted_at_{position}"] = share
    return metrics
