"""Mistakes made with a real server, not by editing files: other layers served, a prefix cache on, a final state of
another kind than its label says.

One server makes all three: it was asked for layers 2, 4 and 6 where the dump says 1, 3 and 5, and somebody started it
without `--disable-radix-cache`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import EngineIds
from eagle3.dump.manifest import DumpError
from eagle3.dump.reader import DumpReader
from eagle3.dump.writer import CapturedSample, DumpWriter
from eagle3.evidence.references import TargetReference
from eagle3.evidence.report import EvidenceReport
from eagle3.evidence.validate import validate_dump
from eagle3.target import Target
from infra.settings import Settings
from infra.sglang import server as server_module
from infra.sglang.info import capture_problems
from infra.sglang.launch import CaptureServing, LaunchPlan, ServerConfig, launch_plan
from infra.sglang.server import SglangServer, start_server
from infra.sglang.staging import staged_path
from tests.dumps import SPEC, Capture, engine_record, reseal, write_dump
from tests.integration.tap_support import body, last_event, post, prompt
from tests.served import Asked, Served, capture_served, captured
from tests.targets import HIDDEN

pytestmark = pytest.mark.integration

SENT = EngineIds(engine="sglang", version="0.5.23", model_class="LlamaForCausalLM", ids=(2, 4, 6))
SERVED = tuple(CapturePoint(f"layers.{i}") for i in SENT.ids)


@dataclass(frozen=True)
class Scene:
    """The server, its staging folder, and what it captured of six prompts that it had not seen."""

    server: SglangServer
    staging: Path
    target: Target
    reference: TargetReference
    served: Served
    capture: Capture

    def judge(self, folder: Path, capture: Capture, spec: CaptureSpec, **changes: Any) -> EvidenceReport:
        changes = {"engine": self.served.engine, "generation": self.served.generation} | changes
        write_dump(capture, folder, spec=spec, probe=False, **changes)
        return self.examine(folder)

    def examine(self, folder: Path) -> EvidenceReport:
        return validate_dump(DumpReader.open(folder), self.capture.parts, reference=self.reference)


@pytest.fixture(scope="module")
def scene(tiny_llama: Path, sglang_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder, target = tmp_path_factory.mktemp("pitfalls"), Target.open(tiny_llama)
    staging = folder / "staging"

    def by_hand(*arguments: Any) -> LaunchPlan:
        plan = launch_plan(*arguments)
        return replace(plan, command=tuple(part for part in plan.command if part != "--disable-radix-cache"))

    config = ServerConfig(
        target=tiny_llama,
        device="cpu",
        capture=CaptureServing(ids=SENT, staging=staging),
        max_running_requests=8,
        max_total_tokens=8192,
        extra_args=("--enable-return-hidden-states",),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "launch_plan", by_hand)
        server = start_server(config, settings=sglang_settings, log_path=folder / "server.log")
    with server:
        asked = Asked("pitfall", [prompt(12 + 5 * n, seed=77 + n) for n in range(6)], ignore_eos=True)
        spec = CaptureSpec(aux=SERVED)
        served = capture_served(server, staging, asked, spec=spec, ids=SENT)
        reference = TargetReference(target)
        yield Scene(server, staging, target, reference, served, captured(served, staging, target))


def test_under_their_right_names_the_rows_are_proven(scene: Scene, tmp_path: Path) -> None:
    report = scene.judge(tmp_path / "dump", scene.capture, CaptureSpec(aux=SERVED))
    assert report.failed() == ()


def test_wrong_ids_are_found_by_what_the_server_says_and_by_the_tensors(scene: Scene, tmp_path: Path) -> None:
    labelled = _labelled(scene.capture, SPEC)
    report = scene.judge(tmp_path / "told", labelled, SPEC)
    failed = {check.name: check.sentence for check in report.failed()}
    assert set(failed) == {"capture_list", "engine_ids", "attribution"}
    assert "it captured layers.2, layers.4, layers.6" in failed["capture_list"]
    # Without the tap's word, and with a record that agrees with the labels, the tensors alone say so.
    report = scene.judge(tmp_path / "alone", labelled, SPEC, engine=engine_record(labelled.identity, SPEC))
    failed = {check.name: check.sentence for check in report.failed()}
    assert set(failed) == {"attribution"}
    for claimed, held in zip(SPEC.aux, SERVED, strict=True):
        assert f"{claimed} holds {held}" in failed["attribution"]


def test_a_final_state_that_was_normed_under_the_name_of_the_last_layer_is_found(scene: Scene, tmp_path: Path) -> None:
    """SGLang hands out the state after the final norm; a tool that knows vLLM's calls it the last layer's output."""
    spec = CaptureSpec(aux=SERVED, final=CapturePoint("layers.7"))
    report = scene.judge(tmp_path / "dump", _labelled(scene.capture, spec), spec)
    failed = {check.name: check.sentence for check in report.failed()}
    assert {"final_norm", "attribution"} <= set(failed)
    assert "`layers.7` has already been through the final norm" in failed["final_norm"]
    assert "layers.7 holds norm" in failed["attribution"]


def test_a_slot_taken_for_the_final_state_is_found(scene: Scene, tmp_path: Path) -> None:
    """[aux..., final], and a tool that took the last of the slots for the final state."""
    wrong = replace(
        scene.capture,
        samples=tuple(
            replace(s, states={**s.states, CapturePoint("norm"): s.states[CapturePoint("layers.6")]})
            for s in scene.capture.samples
        ),
    )
    failed = {c.name: c.sentence for c in scene.judge(tmp_path / "dump", wrong, CaptureSpec(aux=SERVED)).failed()}
    assert {"final_norm", "final_state", "attribution", "distinct_slots"} <= set(failed)
    assert "norm holds layers.6" in failed["attribution"]


def test_a_prefix_cache_is_refused_before_the_first_prompt_by_the_tap_and_by_the_evidence(
    scene: Scene, tmp_path: Path
) -> None:
    assert any("radix" in problem for problem in capture_problems(scene.server.client.server_info(), SENT))
    first, again = (body(f"cached-{n}", prompt(48, seed=5), 12) for n in (1, 2))
    post(scene.server, first)
    whole = post(scene.server, again | {"return_hidden_states": True})
    assert whole["meta_info"]["cached_tokens"] > 0
    event = last_event(scene.staging, "cached-2")
    assert event["event"] == "incomplete"
    assert not staged_path(scene.staging, "cached-2").exists()
    # SGLang's own answer holds the rows that were computed, and says nothing of the others.
    rows = torch.cat([torch.tensor(part).reshape(-1, HIDDEN) for part in whole["meta_info"]["hidden_states"]])
    tokens = again["input_ids"] + whole["output_ids"][:-1]
    assert 12 <= len(rows) < len(tokens)
    short = _naive_sample(rows, tokens, whole["output_ids"])
    with pytest.raises(DumpError, match="Rows go missing where a prefix cache is on"):
        DumpWriter(tmp_path / "refused", CaptureSpec(aux=SERVED), hidden_size=HIDDEN).add(
            replace(short, prompt_tokens=len(again["input_ids"]))
        )
    capture = replace(scene.capture, samples=(*scene.capture.samples, short))
    write_dump(capture, tmp_path / "dump", spec=CaptureSpec(aux=SERVED), probe=False, engine=scene.served.engine)
    records = list(DumpReader.open(tmp_path / "dump").records)
    records[-1] = records[-1].model_copy(update={"prompt_tokens": len(again["input_ids"])})
    reseal(tmp_path / "dump", records)
    failed = {c.name: c.sentence for c in scene.examine(tmp_path / "dump").failed()}
    assert "prefix cache that answered for the target (disable_radix_cache was False)" in failed["completeness"]


def _labelled(capture: Capture, spec: CaptureSpec) -> Capture:
    """The same tensors under the names of another spec."""
    samples = [
        replace(sample, states=dict(zip(spec.points, sample.states.values(), strict=True)))
        for sample in capture.samples
    ]
    return replace(capture, samples=tuple(samples))


def _naive_sample(rows: torch.Tensor, tokens: list[int], output: list[int]) -> CapturedSample:
    """What a tool makes of the rows that came: as many of the last tokens. The slots are not looked at here."""
    return CapturedSample(
        id="cached",
        input_ids=torch.tensor(tokens[-len(rows) :]),
        last_token_id=output[-1],
        prompt_tokens=len(rows) - len(output) + 1,
        output_tokens=len(output),
        finish_reason="length",
        states={**{point: rows * (n + 2) for n, point in enumerate(SERVED)}, CapturePoint("norm"): rows},
    )
