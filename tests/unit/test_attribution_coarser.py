"""States that went through fewer bits than their dtype has: the labels are right, and the check says it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from eagle3.dump.reader import DumpReader
from eagle3.dump.writer import CapturedSample
from eagle3.evidence.attribution_check import check_attribution
from eagle3.evidence.report import Check
from tests.dumps import SPEC, Alter, capture, reference_of, with_states, write_dump
from tests.targets import make_deepseek, make_llama

pytestmark = pytest.mark.unit


def through(dtype: torch.dtype) -> Alter:
    """The states after they were stored in 8 bits, with a scale for each row where it is an integer's."""

    def store(state: torch.Tensor) -> torch.Tensor:
        if dtype.is_floating_point:
            return state.to(dtype).to(state.dtype)
        step = state.abs().amax(-1, keepdim=True).float() / torch.iinfo(dtype).max
        return ((state / step).round() * step).to(state.dtype)

    def alter(sample: CapturedSample) -> CapturedSample:
        return with_states(sample, {p: store(sample.states[p]) for p in SPEC.aux})

    return alter


def judged(target: Path, folder: Path, ran: torch.dtype, alter: Alter | None) -> Check:
    write_dump(capture(target, dtype=ran), folder, alter=alter)
    return check_attribution(DumpReader.open(folder), reference_of(target))[0]


@pytest.mark.parametrize(
    ("ran", "stored"),
    [
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
        (torch.float32, torch.int8),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e5m2),
    ],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_states_that_went_through_fewer_bits_warn(
    tiny_llama: Path, tmp_path: Path, ran: torch.dtype, stored: torch.dtype
) -> None:
    check = judged(tiny_llama, tmp_path, ran, through(stored))
    assert check.verdict == "warn", check.value
    assert check.points == ()
    assert "layers.1 is right, but coarser than its dtype" in check.sentence
    assert "norm is right, but" not in check.sentence


@pytest.mark.parametrize("ran", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [make_llama, partial(make_deepseek, moe=True)], ids=["dense", "experts"])
def test_the_dtypes_own_arithmetic_does_not(tmp_path: Path, make: Callable[[Path], Path], ran: torch.dtype) -> None:
    check = judged(make(tmp_path / "target"), tmp_path / "dump", ran, None)
    assert check.verdict == "pass", check.sentence
