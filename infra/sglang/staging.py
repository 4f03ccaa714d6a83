"""Our side of the tap: reads what `infra/sglang/tap.py` writes to a staging folder. A folder belongs to one server.

The files come from another process, maybe another machine: names, shapes and sizes are checked before a tensor is used.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from eagle3.dump.manifest import LiveCapture
from eagle3.errors import Eagle3Error, first_fault

_RID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")  # the tap publishes no other
_ITEM_SIZES = {"F32": 4, "BF16": 2, "F16": 2}
MAX_HEADER_BYTES = 64 * 1024
MAX_LIVE_BYTES = 1024 * 1024
MAX_EVENT_BYTES = 16 * 1024  # one line of an event log

_Model = TypeVar("_Model", bound=BaseModel)


class StagingError(Eagle3Error):
    """A staged file that is missing, incomplete or not what the tap writes."""


@dataclass(frozen=True)
class StagedRows:
    """One request's states. Row i is the state after reading token i; rows = prompt_tokens + output_tokens - 1.

    The tensors are mapped from the file and shared with nobody; they stay valid when the file is removed.
    """

    rid: str
    aux: tuple[torch.Tensor, ...]  # a [rows, H] view for each slot, in the order of delivery
    final: torch.Tensor  # [rows, H], after the final norm
    input_ids: torch.Tensor  # [rows] int64
    last_token_id: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    boundaries: torch.Tensor | None = None  # [rows, N + 2, H] of a probe: `embed`, the layers' outputs, `norm`

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer, the last token included, which has no row."""
        return [*self.input_ids.tolist(), self.last_token_id]


class LiveModel(BaseModel):
    """What the running model is and captures, as the tap read it off the model."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    tap_version: str
    sglang_version: str
    model_class: str = Field(description="The model as SGLang loads it; for a wrapper the outer class")
    inner_class: str = Field(description="The class whose decoder captures, e.g. DeepseekV3ForCausalLM in Kimi-K2.5")
    layers_to_capture: tuple[int, ...] = Field(description="Boundaries")
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    dtype: str = Field(description="Of the states, e.g. float32")
    device: str
    decode_graphs: bool = Field(description="Decoded tokens run through CUDA graphs: the tap cannot see them")
    prefill_graphs: bool
    probes: bool = Field(False, description="The tap can see every boundary of a request; it does from 1.1.0 on")
    missing_hooks: tuple[str, ...] = Field(description="Hook points that this SGLang does not have")

    @property
    def capture(self) -> LiveCapture:
        """The part that a dump's manifest keeps."""
        return LiveCapture(
            model_class=self.model_class, layers_to_capture=self.layers_to_capture, tap_version=self.tap_version
        )


class _Request(BaseModel):
    """A staged file's own metadata."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rid: str
    prompt_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=0)
    rows: int = Field(gt=0)
    last_token_id: int = Field(ge=0)
    finish: str

    def finish_type(self) -> str:
        reason = json.loads(self.finish)
        return str(reason["type"])


def staged_path(staging: Path, rid: str) -> Path:
    """Where the tap puts the rows of a request. Raises StagingError for a rid that it would refuse."""
    if not _RID.fullmatch(rid):
        raise StagingError(f"rid {rid[:200]!r}: expected 1 to 128 of A-Z a-z 0-9 . _ -, no dot first")
    return staging / f"{rid}.safetensors"


def read_staged(path: Path, *, num_slots: int, hidden_size: int, num_layers: int | None = None) -> StagedRows:
    """Map the rows of one request, `num_slots` captured layers of `hidden_size` values each.

    `num_layers` is given for a probe, whose file holds every boundary of so many layers too. Raises StagingError where
    the file is absent, or where it is not exactly what the tap writes for this capture.
    """
    if path.is_symlink() or not path.is_file():
        raise StagingError(f"{path}: no staged file; why_missing() reads the reason off the tap's events")
    try:
        with safe_open(path, framework="pt") as file:
            request = _parse(_Request, file.metadata() or {}, str(path))
            rows = request.rows
            shapes = {
                "aux_hidden_states": [rows, num_slots * hidden_size],
                "final_hidden_state": [rows, hidden_size],
                "input_ids": [rows],
            }
            if num_layers is not None:
                shapes["boundaries"] = [rows, num_layers + 2, hidden_size]
            names = set(file.keys())
            if names != set(shapes):
                raise StagingError(f"{path}: expected the tensors {sorted(shapes)}, found {sorted(names)}")
            _check_rows(path, request)
            _check_shapes(path, file, shapes, f"{num_slots} captured layers of {hidden_size} values")
            aux = file.get_tensor("aux_hidden_states")
            final = file.get_tensor("final_hidden_state")
            ids = file.get_tensor("input_ids")
            boundaries = file.get_tensor("boundaries") if num_layers is not None else None
            reason = request.finish_type()
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise StagingError(f"{path}: not a file of the tap: {error}") from None
    return StagedRows(
        rid=request.rid,
        aux=aux.split(hidden_size, dim=1),
        final=final,
        input_ids=ids,
        last_token_id=request.last_token_id,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        finish_reason=reason,
        boundaries=boundaries,
    )


def _check_rows(path: Path, request: _Request) -> None:
    if request.rid != path.name.removesuffix(".safetensors"):
        raise StagingError(f"{path}: holds the rows of request {request.rid!r}")
    expected = request.prompt_tokens + request.output_tokens - 1
    if request.rows != expected:
        raise StagingError(
            f"{path}: {request.rows} rows, but {request.prompt_tokens} tokens of prompt and {request.output_tokens} of "
            f"answer have {expected} (the last one is never read)"
        )


def _check_shapes(path: Path, file: Any, shapes: dict[str, list[int]], what: str) -> None:
    slices = {name: file.get_slice(name) for name in shapes}
    for name, shape in shapes.items():
        found = slices[name].get_shape()
        if found != shape:
            raise StagingError(f"{path}: {name} is {found}, expected {shape} for {what}")
    dtypes = {name: part.get_dtype() for name, part in slices.items()}
    ids = dtypes.pop("input_ids")
    (states, *others) = set(dtypes.values())
    if ids != "I64" or others or states not in _ITEM_SIZES:
        raise StagingError(
            f"{path}: data types {dtypes}, {ids} (ids); expected I64 ids and states of one of {', '.join(_ITEM_SIZES)}"
        )
    payload = sum(prod(shape) * (8 if name == "input_ids" else _ITEM_SIZES[states]) for name, shape in shapes.items())
    size = path.stat().st_size
    if not payload < size <= payload + MAX_HEADER_BYTES:
        raise StagingError(f"{path}: {size} bytes where its tensors need {payload}")


def read_live(staging: Path) -> LiveModel:
    """What the running model captures. Raises StagingError where there is no record, or ranks disagree."""
    records = {path: _read_live(path) for path in sorted(staging.glob("live.*.json"))}
    if not records:
        raise StagingError(
            f"{staging}: no record of a live model. The server has not loaded the tap: install the tap beside its "
            "SGLang (pip install --no-deps ./infra/sglang/tap_dist), start it with EAGLE3_TAP_DIR naming this folder, "
            'and look for "eagle3_tap" in its log'
        )
    first, *others = records.values()
    if any(other != first for other in others):
        told = "; ".join(
            f"{path.name}: {record.model_class} {list(record.layers_to_capture)}" for path, record in records.items()
        )
        raise StagingError(f"{staging}: records of live models disagree ({told}). A staging folder is for one server")
    if first.missing_hooks:
        raise StagingError(
            f"{staging}: SGLang {first.sglang_version} does not have what the tap {first.tap_version} hooks: "
            f"{', '.join(first.missing_hooks)}. It captures under SGLang 0.5.23"
        )
    return first


def _read_live(path: Path) -> LiveModel:
    try:
        if path.stat().st_size > MAX_LIVE_BYTES:
            raise StagingError(f"{path}: longer than {MAX_LIVE_BYTES} bytes")
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StagingError(f"{path}: not a record of the tap: {error}") from None
    return _parse(LiveModel, record, str(path))


def why_missing(staging: Path, rid: str) -> str:
    """One sentence: why the tap has not published this request's rows."""
    found = [event for event in events(staging) if event.get("rid") == rid[:200]]
    if not found:
        if not any(staging.glob("live.*.json")):
            return f"request {rid}: the server has not loaded the tap (no record of a live model in {staging})"
        return f'request {rid}: the tap has not seen it end, or it did not ask (custom_params: {{"tap": true}})'
    last = found[-1]
    return f"request {rid}: {last.get('event')}: {last.get('why', 'no reason given')}"


def events(staging: Path) -> Iterator[dict[str, Any]]:
    """Every event of the tap, in order of time within a file; lines that are none are passed over (half written)."""
    for path in sorted(staging.glob("events.*.jsonl")):
        with path.open("rb") as file:
            while line := file.readline(MAX_EVENT_BYTES):
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    yield event


def clear(staging: Path, rid: str) -> None:
    """Remove what is staged for a request, also what a killed server left half written. Its events stay."""
    path = staged_path(staging, rid)
    path.unlink(missing_ok=True)
    for half in staging.glob(f"{path.name}.*.tmp"):
        half.unlink(missing_ok=True)


def _parse(model: type[_Model], data: Any, where: str) -> _Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        field, what = first_fault(error)
        raise StagingError(f"{where}: not what the tap writes: {field}: {what}") from None
