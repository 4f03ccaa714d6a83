"""The probe on real servers: every boundary of a tiny Llama and a tiny DeepSeek, beside ordinary requests."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from eagle3.capture import CapturePoint, CaptureSpec, all_points
from eagle3.dump.probe import read_probe
from eagle3.prompts import TokenizedPrompt
from eagle3.target import Target
from flows.cli import app
from infra.sglang.server import SglangServer
from infra.sglang.staging import read_live, read_staged, staged_path
from tasks.capture_session import CaptureRefused, Session
from tasks.params import ExtractParams
from tasks.probe import judge_probe, take_probe
from tests.dumps import capture, states_of, write_dump
from tests.integration.conftest import POINTS, capture_ids
from tests.integration.tap_support import (
    TOLERANCE,
    Reference,
    assert_states,
    body,
    events_of,
    last_event,
    load_reference,
    post,
    prompt,
    published,
    staged,
)
from tests.targets import HIDDEN, LAYERS, make_llama

pytestmark = pytest.mark.integration

States = Callable[[list[int]], dict[CapturePoint, torch.Tensor]]


@dataclass(frozen=True)
class Served:
    server: SglangServer
    staging: Path
    target: Path
    model_class: str


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def served(request: pytest.FixtureRequest) -> Served:
    kind = request.param
    return Served(
        request.getfixturevalue(f"{kind}_server"),
        request.getfixturevalue(f"{kind}_staging"),
        request.getfixturevalue(f"tiny_{kind}"),
        {"llama": "LlamaForCausalLM", "deepseek": "DeepseekV3ForCausalLM"}[kind],
    )


@pytest.fixture(scope="module")
def boundaries(served: Served) -> States:
    model = AutoModelForCausalLM.from_pretrained(served.target, dtype=torch.float32).eval()
    return lambda ids: states_of(model, torch.tensor(ids))


@pytest.fixture(scope="module")
def hidden_states(served: Served) -> Reference:
    return load_reference(served.target)


def assert_probe(served: Served, request: dict[str, Any], boundaries: States) -> None:
    """Every boundary is transformers' own, and what the dump's path captured beside it is the same."""
    path = staged_path(served.staging, request["rid"])
    rows = read_staged(path, num_slots=3, hidden_size=HIDDEN, num_layers=LAYERS)
    assert rows.boundaries is not None
    expected = boundaries(request["input_ids"])
    assert rows.input_ids.tolist() == request["input_ids"]
    for place, point in enumerate(all_points(LAYERS)):
        torch.testing.assert_close(rows.boundaries[:, place], expected[point], rtol=0, atol=TOLERANCE)
    for point, aux in zip((*POINTS, CapturePoint("norm")), (*rows.aux, rows.final), strict=True):
        torch.testing.assert_close(aux, expected[point], rtol=0, atol=TOLERANCE)


def test_every_boundary_is_right_in_a_batch_with_ordinary_requests_which_keep_theirs(
    served: Served, boundaries: States, hidden_states: Reference
) -> None:
    probes = [body(f"probe-{i}", prompt(length, seed=9), 1, tap="probe") for i, length in enumerate((1, 5, 48, 90))]
    tapped = [body(f"beside-{i}", prompt(length, seed=9), 12) for i, length in enumerate((15, 70, 200))]
    plain = [body(f"untapped-{i}", prompt(length, seed=9), 12, tap=None) for i, length in enumerate((20, 60))]
    alone = [post(served.server, request | {"rid": f"{request['rid']}-alone"})["output_ids"] for request in plain]
    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda request: post(served.server, request), probes + tapped + plain))
    for request in probes:
        assert_probe(served, request, boundaries)
        assert [event["event"] for event in events_of(served.staging, request["rid"])] == ["published"]
    for request, answer in zip(tapped, answers[len(probes) :], strict=False):
        assert_states(staged(served.staging, request["rid"]), request["input_ids"], answer["output_ids"], hidden_states)
    assert [answer["output_ids"] for answer in answers[-2:]] == alone


def test_a_probe_that_asks_for_an_answer_is_refused_and_answered(served: Served) -> None:
    answer = post(served.server, body("probe-long", prompt(9), 3, tap="probe"))
    assert len(answer["output_ids"]) == 3
    assert last_event(served.staging, "probe-long")["event"] == "refused"
    assert "probe-long" not in published(served.staging)


def test_the_live_models_slots_are_what_they_claim(served: Served) -> None:
    target = Target.open(served.target)
    assert read_live(served.staging).probes
    prompts = [TokenizedPrompt(f"p{i}", tuple(prompt(30 + 20 * i))) for i in range(5)]
    probe = take_probe(served.server.client, served.staging, target, (*POINTS, CapturePoint("norm")), prompts)
    check = judge_probe(probe, target)
    assert (check.verdict, check.sentence) == (
        "pass",
        "Every slot is the boundary that it is called, counted from both ends.",
    )
    assert [s.id for s in probe.info.sequences] == ["prose", "code", "mixed", "p0", "p2", "p4"]
    assert [s.tokens for s in probe.info.sequences][3:] == [30, 48, 48]
    assert (probe.info.dtype, probe.info.model_class) == ("float32", served.model_class)
    assert not [path for path in served.staging.glob("probe-*.safetensors") if "-00" in path.name]


def test_ids_that_capture_other_layers_are_found_before_the_first_prompt(served: Served) -> None:
    """The same server, asked for layers 2, 4 and 6 by ids that it takes for 1, 3 and 5."""
    wanted = CaptureSpec(aux=("layers.2", "layers.4", "layers.6"))
    params = ExtractParams.model_validate({"capture": wanted.model_dump()})
    session = Session(
        params, Target.open(served.target), capture_ids(served.model_class), served.staging, served.server.client
    )
    with pytest.raises(CaptureRefused, match=r"Asked for layers\.2, the server delivered layers\.1") as refused:
        session.probe([TokenizedPrompt("p", (5, 6, 7))])
    assert "Asked for layers.6, the server delivered layers.5" in str(refused.value)
    assert "norm, the server" not in str(refused.value)


def test_a_server_of_other_weights_is_found_at_both_ends(served: Served, tmp_path: Path) -> None:
    """Same class and shape, so nothing that the server says of itself differs."""
    other = make_llama(tmp_path / "other", seed=3)
    points = (*POINTS, CapturePoint("norm"))
    probe = take_probe(served.server.client, served.staging, Target.open(other), points)
    check = judge_probe(probe, Target.open(other))
    assert check.points == ("embed", "norm")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["probe", *arguments])


def test_the_command_says_what_a_server_delivers_and_compares_it_with_a_dump(
    llama_server: SglangServer, llama_staging: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    write_dump(capture(tiny_llama), tmp_path / "dump")
    file = tmp_path / "probe.safetensors"
    server = ("--server", llama_server.url, "--staging", str(llama_staging), "--target", str(tiny_llama))
    shown = run(*server, "--out", str(file), "--compare", str(tmp_path / "dump"))
    assert shown.exit_code == 0, shown.output
    assert "layers.3    is layers.3 (error" in shown.output
    assert "Every boundary agrees, and the slots are the same" in shown.output
    assert read_probe(file).info.captured == (*POINTS, "norm")

    write_dump(capture(tiny_llama), tmp_path / "moved", spec=CaptureSpec(aux=("layers.0", "layers.3", "layers.5")))
    told = run(*server, "--out", str(file), "--compare", str(tmp_path / "moved"), "--json")
    assert told.exit_code == 1
    report = json.loads(told.stdout)
    assert report["verdict"] == "pass"
    assert report["refuted"]
    assert report["comparison"]["other_slots"] == ["layers.0", "layers.3", "layers.5", "norm"]
    assert all(boundary["fits"] for boundary in report["comparison"]["boundaries"])

    other = make_llama(tmp_path / "other", seed=3)
    elsewhere = ("--server", llama_server.url, "--staging", str(llama_staging), "--target", str(other))
    wrong = run(*elsewhere, "--out", str(file))
    assert wrong.exit_code == 1
    assert "fail: What goes into the first decoder layer is not the embedding" in wrong.output

    write_dump(capture(tiny_llama), tmp_path / "without", probe=False)
    nothing = run(*server, "--out", str(file), "--compare", str(tmp_path / "without"))
    assert nothing.exit_code == 3
    unreachable = run("--server", "http://127.0.0.1:9", *server[2:], "--out", str(file))
    assert unreachable.exit_code == 3
