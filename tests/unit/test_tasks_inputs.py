"""What is refused before anything starts."""

import json
import shutil
from pathlib import Path

import pytest

from eagle3.capture import CaptureError, CapturePoint, CaptureSpec
from eagle3.prompts import PromptError, TokenizedPrompt
from eagle3.target import Target
from infra.settings import Settings
from infra.store import StoreError, open_store
from tasks.inputs import NoRoom, bytes_per_token, check_room, most_bytes, prompt_parts, resolve_ids, touch_store
from tasks.params import AnswerParams, PipelineParams, PromptParams
from tasks.planning import plan_pipeline
from tests.targets import CONTEXT

pytestmark = pytest.mark.unit

AUX = tuple(CapturePoint(f"layers.{i}") for i in (1, 3, 5))


def test_a_final_state_that_sglang_does_not_deliver_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    capture = CaptureSpec(aux=AUX, final=CapturePoint("layers.7"))
    with pytest.raises(CaptureError, match="SGLang delivers the state after the final norm"):
        resolve_ids(capture, version="0.5.23", model_class="LlamaForCausalLM", num_layers=8)
    params = PipelineParams.model_validate(
        {"target": {"path": str(tiny_llama)}, "capture": capture.model_dump(), "mismatch": None}
    )
    with pytest.raises(CaptureError, match="set it to norm"):
        plan_pipeline(params, Settings(home=tmp_path))


def test_a_layer_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"no layers\.8"):
        resolve_ids(CaptureSpec(aux=("layers.8",)), version="0.5.23", model_class="LlamaForCausalLM", num_layers=8)


def test_a_held_out_prompt_that_does_not_fit_is_refused_before_the_extraction(tiny_llama: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"Tom has {n} apples.", "split": "train"} for n in range(3)]
    lines.append({"prompt": "apples " * CONTEXT, "split": "heldout", "id": "long"})
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(PromptError, match="prompt long has"):
        prompt_parts(PromptParams(file=str(file), num_heldout=1), AnswerParams(), Target.open(tiny_llama))


def test_later_turns_are_counted_for_each_part(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    turns = [["One?", "Two?", "Three?"], ["Four?", "Five?"], ["Six?"]]
    splits = ["train", "heldout", "train"]
    lines = [{"turns": turn, "split": split} for turn, split in zip(turns, splits, strict=True)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = prompt_parts(PromptParams(file=str(file), num_heldout=1), AnswerParams(), Target.open(tiny_llama))
    assert [(len(part.prompts), part.ignored_turns) for part in parts] == [(2, 2), (1, 1)]


def test_the_bound_of_a_dump_counts_every_row(tmp_path: Path) -> None:
    per_token = bytes_per_token(CaptureSpec(aux=AUX), 64, "float32")
    assert per_token == 4 * 64 * 4
    prompts = [TokenizedPrompt("a", (1, 2, 3)), TokenizedPrompt("b", (1,))]
    assert most_bytes(prompts, 10, per_token) == (3 + 9 + 1 + 9) * (per_token + 9)


def test_a_disk_that_is_too_small_is_refused_by_how_much_it_lacks(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_room(tmp_path, free // 2)
    with pytest.raises(NoRoom, match=r"(?s)GB are free: 5\d\.\d\d GB lack\. .*EAGLE3_HOME"):
        check_room(tmp_path, free + 50 * 10**9 + 10**9)


def test_a_store_that_takes_no_object_is_found_at_once(tmp_path: Path) -> None:
    touch_store(open_store((tmp_path / "store").as_uri(), Settings()))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"checks/writable\.txt"):
        touch_store(open_store((tmp_path / "file").as_uri(), Settings()))
