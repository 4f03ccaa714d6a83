"""What the extraction refuses of a server: its flags, its live model, and rows that do not come."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import EngineIds, ids_of
from eagle3.prompts import TokenizedPrompt
from eagle3.target import Target
from infra.sglang.client import Generated, SglangClient
from infra.sglang.info import ModelInfo, ServerInfo
from infra.sglang.staging import LiveModel, staged_path
from tasks.capture_session import CaptureRefused, Session, check_live, check_server, check_weights
from tasks.params import ExtractParams
from tests.targets import HIDDEN, LAYERS, make_kimi, make_llama

pytestmark = pytest.mark.unit

SPEC = CaptureSpec(aux=tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 5)))
PARAMS = ExtractParams(capture=SPEC)
LLAMA = "LlamaForCausalLM"


def ids(model_class: str = LLAMA) -> EngineIds:
    return ids_of(SPEC.aux, engine="sglang", version="0.5.23", model_class=model_class, num_layers=LAYERS)


def info(**changes: Any) -> ServerInfo:
    told = {
        "version": "0.5.23",
        "model_path": "target",
        "disable_radix_cache": True,
        "enable_return_aux_hidden_states": True,
        "return_aux_hidden_state_layer_ids": [1, 3, 5],
        "aux_hidden_state_capture": "eagle3",
        "return_hidden_states_mode": "full",
        "cuda_graph_backend_decode": "disabled",
    }
    return ServerInfo.model_validate(told | changes)


def live(**changes: Any) -> LiveModel:
    told = {
        "tap_version": "1",
        "sglang_version": "0.5.23",
        "model_class": LLAMA,
        "inner_class": LLAMA,
        "layers_to_capture": (2, 4, 6),
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "dtype": "float32",
        "device": "cpu",
        "decode_graphs": False,
        "prefill_graphs": False,
        "missing_hooks": (),
    }
    return LiveModel.model_validate(told | changes)


def test_a_server_that_would_lose_rows_is_refused_with_every_reason() -> None:
    spoilt = info(disable_radix_cache=False, return_aux_hidden_state_layer_ids=[1, 2])
    with pytest.raises(CaptureRefused) as refused:
        check_server(spoilt, ids(), "auto")
    assert "- The server captures layer ids [1, 2]" in str(refused.value)
    assert "- The radix cache is on" in str(refused.value)


def test_how_states_are_captured_follows_the_servers_own_graphs() -> None:
    graphs = info(cuda_graph_backend_decode="full")
    assert check_server(info(), ids(), "auto") == "while_answering"
    assert check_server(graphs, ids(), "auto") == "answer_then_prefill"
    assert check_server(info(), ids(), "answer_then_prefill") == "answer_then_prefill"
    with pytest.raises(CaptureRefused, match="needs decode graphs off"):
        check_server(graphs, ids(), "while_answering")


def test_the_live_models_own_list_is_kept_as_evidence(tiny_llama: Path) -> None:
    kept = check_live(live(), ids(), Target.open(tiny_llama), PARAMS)
    assert (kept.model_class, kept.layers_to_capture) == (LLAMA, (2, 4, 6))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"layers_to_capture": (1, 3, 5)}, r"with ids \[1, 3, 5\], but the live .* captures layers\.0, layers\.2"),
        (
            {"model_class": "TransformersForCausalLM", "inner_class": "LlamaModel"},
            "SGLang runs TransformersForCausalLM",
        ),
        ({"num_layers": 9}, "serves another model"),
        ({"hidden_size": 32}, "serves another model"),
    ],
)
def test_a_live_model_that_is_not_the_one_asked_for_is_refused(
    tiny_llama: Path, changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CaptureRefused, match=sentence):
        check_live(live(**changed), ids(), Target.open(tiny_llama), PARAMS)


def test_a_server_of_another_folder_is_refused_although_its_model_looks_the_same(
    tiny_llama: Path, tmp_path: Path
) -> None:
    other = make_llama(tmp_path / "tuned" / tiny_llama.name, seed=1)  # same class, shape and configuration
    check_live(live(), ids(), Target.open(other), PARAMS)
    with pytest.raises(CaptureRefused, match=f"answers with the model {other}, and the target is {tiny_llama}"):
        check_weights(info(), ModelInfo(model_path=str(other)), Target.open(tiny_llama))
    for unknown in (tiny_llama.name, "someone/tiny-llama"):  # relative to a folder or a hub that we do not see
        with pytest.raises(CaptureRefused, match="nobody compared them"):
            check_weights(info(), ModelInfo(model_path=unknown), Target.open(tiny_llama))


def test_the_targets_folder_is_known_through_a_link(tiny_llama: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tiny_llama, target_is_directory=True)
    check_weights(info(), ModelInfo(model_path=str(link)), Target.open(tiny_llama))
    check_weights(info(), ModelInfo(model_path=str(tiny_llama)), Target.open(link))


def test_a_server_with_random_weights_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(CaptureRefused, match="load_format dummy"):
        check_weights(info(load_format="dummy"), ModelInfo(model_path=str(tiny_llama)), Target.open(tiny_llama))


def test_a_wrapper_is_known_by_its_outer_class(tmp_path: Path) -> None:
    target = Target.open(make_kimi(tmp_path / "kimi"))
    told = live(model_class="KimiK25ForConditionalGeneration", inner_class="DeepseekV3ForCausalLM")
    assert check_live(told, ids(target.model_class), target, PARAMS).model_class == target.model_class


def answer_of(rid: str, output_ids: tuple[int, ...]) -> Generated:
    return Generated.model_validate(
        {
            "rid": rid,
            "output_ids": output_ids,
            "text": "a",
            "finish_reason": "length",
            "prompt_tokens": 4,
            "completion_tokens": len(output_ids),
            "latency_s": 0.1,
            "counts": {"verifications": 0, "correct": 0, "proposed": 0},
        }
    )


def stage(folder: Path, rid: str, input_ids: list[int], *, prompt_tokens: int, last_token_id: int) -> None:
    """Rows of a request as the tap stages them."""
    rows = len(input_ids)
    tensors = {
        "aux_hidden_states": torch.ones(rows, len(SPEC.aux) * HIDDEN),
        "final_hidden_state": torch.ones(rows, HIDDEN),
        "input_ids": torch.tensor(input_ids),
    }
    metadata = {
        "rid": rid,
        "prompt_tokens": prompt_tokens,
        "output_tokens": rows - prompt_tokens + 1,
        "rows": rows,
        "last_token_id": last_token_id,
        "finish": json.dumps({"type": "length"}),
    }
    save_file(tensors, staged_path(folder, rid), {key: str(value) for key, value in metadata.items()})


def test_rows_of_other_tokens_than_prompt_and_answer_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    prompt = TokenizedPrompt("p1", (1, 2, 3, 4))
    with SglangClient("http://127.0.0.1:9") as client:
        session = Session(PARAMS, Target.open(tiny_llama), ids(), tmp_path, client)
        stage(tmp_path, "a-0", [1, 2, 3, 4, 7], prompt_tokens=4, last_token_id=8)
        assert session.sample(prompt, "a-0", answer_of("a-0", (7, 8))).last_token_id == 8
        stage(tmp_path, "p-0", [1, 2, 3, 4, 7], prompt_tokens=5, last_token_id=9)  # read again; what came next is idle
        assert session.sample(prompt, "p-0", answer_of("p-0", (7, 8))).last_token_id == 8
        for rid, tokens in (("a-1", [1, 2, 9, 4, 7]), ("a-2", [1, 2, 3, 4, 9]), ("a-3", [1, 2, 3, 4])):
            stage(tmp_path, rid, tokens, prompt_tokens=4, last_token_id=8)
            with pytest.raises(CaptureRefused, match=r"prompt p1: the captured rows belong to . tokens"):
                session.sample(prompt, rid, answer_of(rid, (7, 8)))


def test_rows_that_do_not_come_are_refused_with_the_taps_own_reason(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "live.0.json").write_text("{}")
    event = {"rid": "check-x-000000", "event": "refused", "why": "3 of 4 rows were seen"}
    (tmp_path / "events.0.jsonl").write_text(json.dumps(event) + "\n")
    answer = answer_of("check-x-000000", (7,))
    with SglangClient("http://127.0.0.1:9") as client:
        session = Session(PARAMS, Target.open(tiny_llama), ids(), tmp_path, client)
        with pytest.raises(CaptureRefused, match=r"prompt p1: no rows were captured: .*3 of 4 rows were seen"):
            session.sample(TokenizedPrompt("p1", (1, 2, 3, 4)), answer.rid, answer)
