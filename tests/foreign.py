"""Dumps in other people's layouts, made from a tiny target's own states: what each slot really holds is known."""

import gzip
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.capture import CapturePoint
from eagle3.dump.writer import CapturedSample
from tests.dumps import Capture

AUX = ("layers.2", "layers.4", "layers.6")


def write_request_folders(captured: Capture, path: Path, *, aux: Sequence[str] = AUX, final: str = "norm") -> Path:
    """Our own dumps of before: a folder a request, a tensor a file."""
    for sample in captured.samples:
        folder = path / sample.id
        folder.mkdir(parents=True)
        for index, point in enumerate(aux):
            torch.save(_state(sample, point), folder / f"aux_{index}.pt")
        torch.save(_state(sample, final), folder / "final.pt")
        torch.save(sample.input_ids.clone(), folder / "input_ids.pt")
    return path


def write_state_lists(captured: Capture, path: Path, *, aux: Sequence[str] = AUX, final: str = "norm") -> Path:
    """`[aux..., final]`, whose first entry a comment calls "embed"; the token ids, with the unread last one, beside."""
    path.mkdir(parents=True)
    for sample in captured.samples:
        hs = [_state(sample, point) for point in (*aux, final)]  # hs[0]: embed (so says the comment)
        torch.save(hs, path / f"{sample.id}.pt")
        (path / f"{sample.id}.json").write_text(json.dumps([*sample.input_ids.tolist(), sample.last_token_id]))
    return path


def write_specforge(
    captured: Capture, path: Path, *, aux: Sequence[str] = AUX, final: str = "norm", zipped: bool = False
) -> Path:
    folder = path / "rows_0-5000"
    folder.mkdir(parents=True)
    for index, sample in enumerate(captured.samples):
        row = {
            "input_ids": sample.input_ids.clone(),
            "loss_mask": torch.ones(len(sample.input_ids), dtype=torch.int64),
            "hidden_state": _state(sample, final)[None],
            "aux_hidden_state": torch.cat([_state(sample, point) for point in aux], dim=-1)[None],
        }
        file = folder / f"data_{index}.ckpt"
        torch.save(row, file)
        if zipped:
            Path(f"{file}.gz").write_bytes(gzip.compress(file.read_bytes(), 1))
            file.unlink()
    return path


def write_speculators(
    captured: Capture, path: Path, *, aux: Sequence[str] = AUX, final: str = "layers.7", fp8: bool = False
) -> Path:
    folder = path / "hidden_states"
    folder.mkdir(parents=True)
    for index, sample in enumerate(captured.samples):
        states = torch.stack([_state(sample, point) for point in (*aux, final)], dim=1)  # [T, L, H]
        tensors = {"hidden_states": states, "token_ids": sample.input_ids.clone()}
        if fp8:
            scales = (states.float().abs().amax(dim=(1, 2), keepdim=True) / 448).clamp(min=1e-12)
            tensors["hidden_states"] = (states.float() / scales).to(torch.float8_e4m3fn)
            tensors["hidden_states_scales"] = scales
        save_file(tensors, folder / f"hs_{index}.safetensors")
    return path


def write_model_optimizer(captured: Capture, path: Path, *, aux: Sequence[str] = AUX, final: str = "norm") -> Path:
    path.mkdir(parents=True)
    for sample in captured.samples:
        conversation = {
            "input_ids": sample.input_ids.clone(),
            "hidden_states": _state(sample, final),
            "aux_hidden_states": torch.cat([_state(sample, point) for point in aux], dim=-1),
            "conversation_id": sample.id,
        }
        torch.save(conversation, path / f"{sample.id}.pt")
    return path


WRITERS: dict[str, Callable[..., Path]] = {
    "request-folders": write_request_folders,
    "state-list": write_state_lists,
    "specforge": write_specforge,
    "speculators": write_speculators,
    "model-optimizer": write_model_optimizer,
}


class Code:
    """Pickles into a call that makes a folder: what a pickle can do to whoever loads it."""

    def __init__(self, creates: Path) -> None:
        self.creates = creates

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.creates),)


def _state(sample: CapturedSample, point: str) -> torch.Tensor:
    return sample.states[CapturePoint(point)].clone()
