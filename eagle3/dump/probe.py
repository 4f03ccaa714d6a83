"""The probe: a few sequences with every boundary of the target, taken on another path than the dump's own states.

A dump says of each of its tensors which boundary of the target it is; the probe is what that claim is held against. It
is small, so it can be kept for every boundary: full rows for the captured points and for the two ends (`embed`,
`layers.(N-1)`, `norm`), and for every point a random projection to 64 numbers a row, which keeps distances. So a dump
of a target that no CPU can run can still be attributed later, and a serving engine can be compared with it.

`probe.safetensors`, T rows in all:

    input_ids            [T]          int64
    cu_seqlens           [S + 1]      int64: where each sequence starts, and the last one ends
    projections          [N+2, T, D]  float32: `embed`, `layers.0` ... `layers.(N-1)`, `norm`
    rows.<point>         [T, H]       what the hooks saw there
    captured.<point>     [T, H]       what the dump's own path delivered under that name, in the same forward passes

Row t is the state after reading token t. What stands beside the tensors is `ProbeInfo`, as JSON in the file's metadata.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eagle3.capture import CapturePoint, all_points, check_points
from eagle3.digests import canonical_json, sha256_file
from eagle3.dump.content import dtype_name
from eagle3.dump.files import check_layout, named_file, publish
from eagle3.dump.manifest import DumpError, FileEntry, Manifest
from eagle3.errors import first_fault

PROBE_NAME = "probe.safetensors"
MAX_TOKENS = 48
"""Of one sequence. 3 sequences of 48 tokens named the right layer in 22 of 22 trials, under every noise tried."""
NUM_SAMPLES = 3
DIMS: Final = 64
SEED: Final = 0
MAX_PROBE_BYTES = 2**30  # 61 layers of width 7168 in float32 need 100 MB
_MAX_INFO_BYTES = 2**20
_INFO = "probe"

# Chosen once: they must stay as they are, or probes of different times cannot be compared.
TEXTS: Mapping[str, str] = {
    "prose": (
        "The harbour was still grey when the first boats came in. Nobody on the quay spoke; they counted the lamps "
        "instead, one for each crew, and when the ninth was out from behind the mole the old woman sat down at last."
    ),
    "code": (
        "def merge(left, right):\n    out = []\n    while left and right:\n"
        "        smaller = left if left[0] <= right[0] else right\n        out.append(smaller.pop(0))\n"
        "    return out + left + right\n\nassert merge([1, 4], [2, 3])"
    ),
    "mixed": (
        'Frage 7: 12 x 17 = 204, et 204 / 8 = 25,5. {"id": 31, "ok": true}\n東京は夜の七時、気温は18°C。 '
        "Ответ: да, но не сразу; см. §4.2 (стр. 19–23) <b>wichtig</b> 🙂 3.14159 26535 89793"
    ),
}


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ProbeSequence(_Model):
    """One sequence: a fixed text of the project by its name, or the beginning of a prompt of the dump by sample id."""

    kind: Literal["text", "sample"]
    id: str = Field(min_length=1, max_length=200)
    tokens: int = Field(gt=0, le=MAX_TOKENS)


class ProbeInfo(_Model):
    """What a probe says of itself."""

    schema_version: Literal[1] = 1
    num_layers: int = Field(gt=0, le=10_000)
    hidden_size: int = Field(gt=0, le=2**20)
    dtype: Literal["float32", "bfloat16", "float16"] = Field(description="Of the rows, as the engine computed them")
    dims: Literal[64] = DIMS
    seed: int = Field(default=SEED, ge=0, le=2**63 - 1)
    captured: tuple[CapturePoint, ...] = Field(
        min_length=1, max_length=1000, description="The slots in delivered order, and the final state: what is claimed"
    )
    sequences: tuple[ProbeSequence, ...] = Field(min_length=1, max_length=1000)
    engine: str = Field(max_length=200, description="Who computed it, e.g. sglang 0.5.23")
    model_class: str = Field(max_length=200)
    tap_version: str = Field(max_length=200)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_points(self.captured, self.num_layers)
        if len(set(self.captured)) != len(self.captured):
            raise ValueError(f"a point is claimed twice: {', '.join(self.captured)}")
        return self

    @property
    def points(self) -> tuple[CapturePoint, ...]:
        """Every point of the target, in the order of `projections`."""
        return all_points(self.num_layers)

    @property
    def full(self) -> tuple[CapturePoint, ...]:
        """The points whose full rows are kept: the captured ones and the two ends of the target."""
        points = self.points
        return tuple(p for p in points if p in {*self.captured, points[0], points[-2], points[-1]})


@dataclass(frozen=True)
class ProbedSequence:
    """One sequence as the engine read it."""

    kind: Literal["text", "sample"]
    id: str
    input_ids: torch.Tensor  # [t] int64
    boundaries: Mapping[CapturePoint, torch.Tensor]  # every point of the target, each [t, H], as the hooks saw it
    captured: Mapping[CapturePoint, torch.Tensor]  # what the dump's path delivered under these names, each [t, H]


@dataclass(frozen=True)
class Probe:
    """A probe in memory. Read one with `read_probe`, make one with `Probe.of`."""

    info: ProbeInfo
    input_ids: torch.Tensor  # [T] int64
    projections: torch.Tensor  # [N+2, T, D] float32
    rows: Mapping[CapturePoint, torch.Tensor]  # info.full, each [T, H]
    captured: Mapping[CapturePoint, torch.Tensor]  # info.captured, each [T, H]

    @classmethod
    def of(
        cls,
        sequences: Sequence[ProbedSequence],
        captured: Sequence[CapturePoint],
        *,
        engine: str,
        model_class: str,
        tap_version: str,
    ) -> Self:
        """Project and keep what the engine's hooks saw. `captured` are the slots in order, then the final state."""
        first = sequences[0].boundaries[CapturePoint("embed")]
        info = ProbeInfo(
            num_layers=len(sequences[0].boundaries) - 2,
            hidden_size=first.shape[1],
            dtype=dtype_name(first.dtype),
            captured=tuple(captured),
            sequences=tuple(ProbeSequence(kind=s.kind, id=s.id, tokens=len(s.input_ids)) for s in sequences),
            engine=engine,
            model_class=model_class,
            tap_version=tap_version,
        )
        matrix = projection(info.hidden_size, info.seed)
        return cls(
            info=info,
            input_ids=torch.cat([s.input_ids for s in sequences]),
            projections=torch.stack(
                [torch.cat([s.boundaries[p] for s in sequences]).float() @ matrix for p in info.points]
            ),
            rows={p: torch.cat([s.boundaries[p] for s in sequences]) for p in info.full},
            captured={p: torch.cat([s.captured[p] for s in sequences]) for p in info.captured},
        )

    def spans(self) -> list[tuple[ProbeSequence, slice]]:
        """Every sequence with its rows."""
        spans, start = [], 0
        for sequence in self.info.sequences:
            spans.append((sequence, slice(start, start + sequence.tokens)))
            start += sequence.tokens
        return spans

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, H] in any float dtype -> [n, D] float32."""
        return rows.float() @ projection(self.info.hidden_size, self.info.seed)


def fixed_texts(tokenizer: Any) -> dict[str, list[int]]:
    """The project's own sequences in a target's tokens: the same for every server and dump of that target."""
    return {name: list(tokenizer.encode(text, add_special_tokens=False))[:MAX_TOKENS] for name, text in TEXTS.items()}


def chosen_samples(num_samples: int) -> list[int]:
    """Which samples of a dump are probed: at most three, evenly spread, both ends among them."""
    last, most = num_samples - 1, min(NUM_SAMPLES, num_samples)
    return [round(i * last / max(most - 1, 1)) for i in range(most)]


@cache
def projection(hidden_size: int, seed: int = SEED) -> torch.Tensor:
    """[H, 64] float32 of +-1/8, from SHAKE-256 of seed and H: the same on every machine, in every version of torch.

    Signs keep squared distances in the mean (Achlioptas 2003); at 64 of them one row's distance is off by 9% (1 sigma),
    and a distance of zero stays zero. One tensor for all who ask: it is not written to.
    """
    stream = hashlib.shake_256(f"eagle3 probe: {hidden_size} x {DIMS}, seed {seed}".encode())
    bits = np.unpackbits(np.frombuffer(stream.digest(hidden_size * DIMS // 8), dtype=np.uint8))
    return torch.from_numpy((bits.astype(np.float32) * 2 - 1) / DIMS**0.5).reshape(hidden_size, DIMS)


def write_probe(path: Path, probe: Probe) -> FileEntry:
    """Write a probe whole or not at all; DumpError where the disk refuses."""
    lengths = [sequence.tokens for sequence in probe.info.sequences]
    tensors = {
        "input_ids": probe.input_ids,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "projections": probe.projections,
        **{f"rows.{point}": state for point, state in probe.rows.items()},
        **{f"captured.{point}": state for point, state in probe.captured.items()},
    }
    metadata = {_INFO: canonical_json(probe.info.model_dump(mode="json")).decode()}
    publish(path, lambda temporary: save_file({k: t.contiguous() for k, t in tensors.items()}, temporary, metadata))
    return FileEntry(name=path.name, bytes=path.stat().st_size, sha256=sha256_file(path))


def read_probe(path: Path) -> Probe:
    """Read a probe and check it: DumpError where it is not one, or where sizes, shapes and its own words disagree."""
    if not path.is_file():
        raise DumpError(
            f"{path}: there is no probe. Extract again, or make one of a running server with `eagle3 probe`"
        )
    if path.stat().st_size > MAX_PROBE_BYTES:
        raise DumpError(f"{path}: a probe of {path.stat().st_size} bytes is refused (limit {MAX_PROBE_BYTES})")
    try:
        with safe_open(path, framework="pt") as file:
            info = _info(path, file.metadata() or {})
            _check_tensors(path, file, info)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise DumpError(f"{path} is not a safetensors file: {error}. Fetch it again, or extract again") from None
    ends = [0, *np.cumsum([sequence.tokens for sequence in info.sequences]).tolist()]
    if tensors["cu_seqlens"].tolist() != ends:
        raise DumpError(
            f"{path}: cu_seqlens {tensors['cu_seqlens'].tolist()[:9]} where its sequences end at {ends[:9]}"
        )
    return Probe(
        info=info,
        input_ids=tensors["input_ids"],
        projections=tensors["projections"],
        rows={point: tensors[f"rows.{point}"] for point in info.full},
        captured={point: tensors[f"captured.{point}"] for point in info.captured},
    )


def read_dump_probe(folder: Path, manifest: Manifest) -> Probe | None:
    """The probe of a dump, None where it has none; DumpError where it is not the one that the manifest names."""
    entry = manifest.probe
    if entry is None:
        return None
    path = named_file(folder, entry)
    probe = read_probe(path)
    said = (probe.info.num_layers, probe.info.hidden_size, probe.info.dtype, probe.info.captured)
    expected = (manifest.target.num_layers, manifest.target.hidden_size, manifest.dtype, manifest.spec.points)
    if said != expected:
        raise DumpError(
            f"{path}: a probe of {said[0]} layers of width {said[1]} in {said[2]} for {', '.join(said[3])}; the dump "
            f"has {expected[0]} layers of width {expected[1]} in {expected[2]} and {', '.join(expected[3])}. The probe "
            "belongs to another dump"
        )
    return probe


def _info(path: Path, metadata: Mapping[str, str]) -> ProbeInfo:
    text = metadata.get(_INFO, "")
    if not text or len(text) > _MAX_INFO_BYTES:
        raise DumpError(f"{path} does not say that it is a probe: expected `{_INFO}` in its metadata")
    try:
        return ProbeInfo.model_validate_json(text)
    except ValidationError as error:
        field, what = first_fault(error, "its metadata")
        raise DumpError(f"{path}: not a probe that this software reads: {field}: {what}") from None


def _check_tensors(path: Path, file: Any, info: ProbeInfo) -> None:
    """Names, dtypes and shapes are the ones that follow from the probe's own words; nothing is read before."""
    tokens = sum(sequence.tokens for sequence in info.sequences)
    state = ({"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[info.dtype], [tokens, info.hidden_size])
    expected: dict[str, tuple[str, list[int]]] = {
        "input_ids": ("I64", [tokens]),
        "cu_seqlens": ("I64", [len(info.sequences) + 1]),
        "projections": ("F32", [info.num_layers + 2, tokens, info.dims]),
        **{f"rows.{point}": state for point in info.full},
        **{f"captured.{point}": state for point in info.captured},
    }
    check_layout(path, file, expected)
