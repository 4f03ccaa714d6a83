"""Reading what the tap stages: whole files of the asked shape, or an error that says what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3.dump.manifest import LiveCapture
from infra.sglang.staging import StagingError, clear, events, read_live, read_staged, staged_path, why_missing

pytestmark = pytest.mark.unit

SLOTS, HIDDEN = 3, 8
PROMPT, ANSWER = 4, 3
ROWS = PROMPT + ANSWER - 1


def write_staged(path: Path, *, metadata: dict[str, Any] | None = None, **changed: torch.Tensor | None) -> Path:
    """A file as the tap writes it; `changed` replaces tensors or, with None, leaves them out."""
    aux = torch.arange(ROWS * SLOTS * HIDDEN, dtype=torch.float32).reshape(ROWS, SLOTS * HIDDEN)
    tensors = {
        "aux_hidden_states": aux,
        "final_hidden_state": -aux[:, :HIDDEN].clone(),
        "input_ids": torch.arange(ROWS),
    }
    tensors |= changed
    told = {
        "rid": path.stem,
        "prompt_tokens": PROMPT,
        "output_tokens": ANSWER,
        "rows": ROWS,
        "last_token_id": 99,
        "finish": json.dumps({"type": "stop", "matched": 99}),
        "tap_version": "1.0.0",
    } | (metadata or {})
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None},
        path,
        {name: str(value) for name, value in told.items() if value is not None},
    )
    return path


def read(path: Path) -> Any:
    return read_staged(path, num_slots=SLOTS, hidden_size=HIDDEN)


def test_rows_are_split_into_slots(tmp_path: Path) -> None:
    rows = read(write_staged(staged_path(tmp_path, "r-1")))
    assert [tuple(slot.shape) for slot in rows.aux] == [(ROWS, HIDDEN)] * SLOTS
    assert [float(slot[1, 0]) for slot in rows.aux] == [24.0, 32.0, 40.0]
    assert float(rows.final[0, 1]) == -1.0
    assert rows.token_ids == [0, 1, 2, 3, 4, 5, 99]
    assert (rows.rid, rows.prompt_tokens, rows.output_tokens, rows.finish_reason) == ("r-1", PROMPT, ANSWER, "stop")


def test_rows_outlive_their_file(tmp_path: Path) -> None:
    rows = read(write_staged(staged_path(tmp_path, "r-1")))
    clear(tmp_path, "r-1")
    assert float(rows.aux[2][ROWS - 1, HIDDEN - 1]) == ROWS * SLOTS * HIDDEN - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_keep_the_data_type_of_the_server(tmp_path: Path, dtype: torch.dtype) -> None:
    aux, final = torch.ones(ROWS, SLOTS * HIDDEN, dtype=dtype), torch.ones(ROWS, HIDDEN, dtype=dtype)
    rows = read(write_staged(staged_path(tmp_path, "r-1"), aux_hidden_states=aux, final_hidden_state=final))
    assert {rows.final.dtype, *(slot.dtype for slot in rows.aux)} == {dtype}


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"aux_hidden_states": torch.zeros(ROWS, 2 * HIDDEN)}, "3 captured layers"),
        ({"aux_hidden_states": torch.zeros(ROWS - 1, SLOTS * HIDDEN)}, "aux_hidden_states is"),
        ({"final_hidden_state": torch.zeros(ROWS, HIDDEN + 1)}, "final_hidden_state is"),
        ({"final_hidden_state": torch.zeros(ROWS, HIDDEN, dtype=torch.float16)}, "data types"),
        ({"input_ids": torch.zeros(ROWS, dtype=torch.int32)}, "data types"),
        ({"input_ids": torch.zeros(ROWS + 1, dtype=torch.int64)}, "input_ids is"),
        ({"final_hidden_state": None}, "expected the tensors"),
        ({"more": torch.zeros(2)}, "expected the tensors"),
        ({"metadata": {"rows": ROWS - 1}}, "never read"),
        ({"metadata": {"rid": "r-2"}}, "holds the rows of request 'r-2'"),
        ({"metadata": {"prompt_tokens": None}}, "prompt_tokens"),
        ({"metadata": {"finish": "stop"}}, "not a file of the tap"),
        ({"metadata": {"finish": "[]"}}, "not a file of the tap"),
    ],
)
def test_anything_but_the_asked_capture_is_refused(tmp_path: Path, changed: dict[str, Any], word: str) -> None:
    with pytest.raises(StagingError, match=word):
        read(write_staged(staged_path(tmp_path, "r-1"), **changed))


def test_a_file_that_is_cut_off_padded_foreign_or_absent_is_refused(tmp_path: Path) -> None:
    path = write_staged(staged_path(tmp_path, "r-1"))
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"\0", whole[:20], b"", b"{}" * 500):
        path.write_bytes(content)
        with pytest.raises(StagingError, match="not a file of the tap"):
            read(path)
    path.unlink()
    with pytest.raises(StagingError, match="no staged file"):
        read(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "staging").mkdir()
    elsewhere = write_staged(tmp_path / "r-1.safetensors")
    link = staged_path(tmp_path / "staging", "r-1")
    link.symlink_to(elsewhere)
    with pytest.raises(StagingError, match="no staged file"):
        read(link)


@pytest.mark.parametrize("rid", ["", "../r-1", "a/b", ".r", "x" * 129, "r 1", "r-1\n"])
def test_a_rid_never_becomes_a_path_of_its_own(tmp_path: Path, rid: str) -> None:
    with pytest.raises(StagingError, match="expected 1 to 128"):
        staged_path(tmp_path, rid)
    with pytest.raises(StagingError, match="expected 1 to 128"):
        clear(tmp_path, rid)


def test_clear_takes_half_written_files_and_leaves_other_requests(tmp_path: Path) -> None:
    names = ("r-1.safetensors", "r-1.safetensors.77.tmp", "r-10.safetensors", "r-10.safetensors.77.tmp", "live.77.json")
    for name in names:
        (tmp_path / name).touch()
    clear(tmp_path, "r-1")
    clear(tmp_path, "r-1")
    assert {path.name for path in tmp_path.iterdir()} == set(names[2:])


LIVE = {
    "tap_version": "1.0.0",
    "sglang_version": "0.5.23",
    "model_class": "KimiK25ForConditionalGeneration",
    "inner_class": "DeepseekV3ForCausalLM",
    "layers_to_capture": [3, 31, 59],
    "num_layers": 61,
    "hidden_size": 7168,
    "dtype": "bfloat16",
    "device": "cuda",
    "tp_rank": 0,
    "dp_rank": None,
    "decode_graphs": True,
    "prefill_graphs": False,
    "missing_hooks": [],
}


def write_live(staging: Path, pid: int, **changed: Any) -> None:
    (staging / f"live.{pid}.json").write_text(json.dumps(LIVE | changed))


def test_live_model_is_read_and_kept_in_the_manifests_words(tmp_path: Path) -> None:
    write_live(tmp_path, 7, dp_rank=0)
    write_live(tmp_path, 8, dp_rank=1)
    live = read_live(tmp_path)
    assert live.decode_graphs
    assert live.inner_class == "DeepseekV3ForCausalLM"
    assert live.capture == LiveCapture(
        model_class="KimiK25ForConditionalGeneration", layers_to_capture=(3, 31, 59), tap_version="1.0.0"
    )


def test_ranks_that_disagree_are_an_error(tmp_path: Path) -> None:
    write_live(tmp_path, 7)
    write_live(tmp_path, 8, layers_to_capture=[2, 30, 58])
    with pytest.raises(StagingError, match=r"\[3, 31, 59\].*\[2, 30, 58\]"):
        read_live(tmp_path)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"missing_hooks": ["sglang.srt.managers.scheduler.Scheduler.send_abort_output"]}, "send_abort_output"),
        ({"num_layers": "many"}, "num_layers"),
        ({"layers_to_capture": None}, "layers_to_capture"),
    ],
)
def test_a_live_record_that_cannot_be_relied_on_is_an_error(tmp_path: Path, changed: dict[str, Any], word: str) -> None:
    write_live(tmp_path, 7, **changed)
    with pytest.raises(StagingError, match=word):
        read_live(tmp_path)


def test_no_live_record_says_how_to_load_the_tap(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match="EAGLE3_TAP_DIR"):
        read_live(tmp_path)
    (tmp_path / "live.7.json").write_text("{")
    with pytest.raises(StagingError, match="not a record of the tap"):
        read_live(tmp_path)


def test_why_missing_tells_the_last_event_of_the_request(tmp_path: Path) -> None:
    assert "has not loaded the tap" in why_missing(tmp_path, "r-1")
    write_live(tmp_path, 7)
    assert "did not ask" in why_missing(tmp_path, "r-1")
    lines = [
        {"event": "published", "rid": "r-1", "rows": 3},
        {"event": "incomplete", "rid": "r-1", "why": "rows 0 to 4 were not computed"},
        {"event": "aborted", "rid": "r-10", "why": "another request"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "events.7.jsonl").write_text("not json\n[1]\n" + text + '{"event": "half wri')
    assert why_missing(tmp_path, "r-1") == "request r-1: incomplete: rows 0 to 4 were not computed"
    assert [event["rid"] for event in events(tmp_path)] == ["r-1", "r-1", "r-10"]


def test_an_event_log_with_an_endless_line_is_read_piece_by_piece(tmp_path: Path) -> None:
    (tmp_path / "events.7.jsonl").write_text(
        "x" * 100_000 + "\n" + json.dumps({"event": "aborted", "rid": "r-1"}) + "\n"
    )
    assert "aborted" in why_missing(tmp_path, "r-1")
