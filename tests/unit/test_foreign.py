"""Other people's layouts: each is recognised by itself, gives the very tensors that were written, and claims no more
than whoever reads it assumes.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3.capture import CapturePoint
from eagle3.dump.foreign import LAYOUTS, ForeignDump, MissingIds, UnknownLayout, open_foreign
from eagle3.dump.manifest import DumpError
from tests.dumps import Capture, capture
from tests.foreign import AUX, WRITERS, write_request_folders, write_specforge, write_speculators, write_state_lists
from tests.targets import LAYERS

pytestmark = pytest.mark.unit

FINALS = {"speculators": "layers.7"}


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama, num_samples=3, max_new_tokens=8)


@pytest.mark.parametrize("layout", WRITERS)
def test_a_layout_is_recognised_and_read_as_it_was_written(captured: Capture, tmp_path: Path, layout: str) -> None:
    dump = open_foreign(WRITERS[layout](captured, tmp_path / "dump"))
    assert dump.layout is LAYOUTS[layout]
    assert (len(dump), dump.hidden_size, dump.dtype) == (3, 64, "float32")
    assert dump.labels == ("aux_0", "aux_1", "aux_2", "final")
    points = (*AUX, FINALS.get(layout, "norm"))
    for sample, original in zip(dump, captured.samples, strict=True):
        slots = sample.slots()
        assert torch.equal(slots.input_ids, original.input_ids)
        for label, point in zip(dump.labels, points, strict=True):
            assert torch.equal(slots.states[label], original.states[CapturePoint(point)])


@pytest.mark.parametrize(
    ("layout", "claims"),
    [
        ("request-folders", {"final": "norm"}),
        ("specforge", {"final": "norm"}),
        ("speculators", {"final": f"layers.{LAYERS - 1}"}),
        ("model-optimizer", {}),
        ("state-list", {"aux_0": "embed"}),
    ],
)
def test_a_layout_claims_only_what_its_readers_assume(
    captured: Capture, tmp_path: Path, layout: str, claims: dict[str, str]
) -> None:
    dump = open_foreign(WRITERS[layout](captured, tmp_path / "dump"))
    said = dump.claims(LAYERS)
    assert set(said) == set(dump.labels)
    assert {label: point for label, point in said.items() if point} == claims


@pytest.mark.parametrize("layout", WRITERS)
def test_a_single_sample_is_a_dump_too(captured: Capture, tmp_path: Path, layout: str) -> None:
    whole = open_foreign(WRITERS[layout](captured, tmp_path / "dump"))
    one = open_foreign(Path(whole.sample(1).where))
    assert (one.layout, len(one)) == (whole.layout, 1)
    assert torch.equal(one.sample(0).states["aux_1"], whole.sample(1).states["aux_1"])


def test_specforges_packed_rows_are_unpacked(captured: Capture, tmp_path: Path) -> None:
    dump = open_foreign(write_specforge(captured, tmp_path / "dump", zipped=True))
    assert [sample.id for sample in dump] == [f"rows_0-5000/data_{i}" for i in range(3)]
    assert torch.equal(dump.sample(2).states["final"], captured.samples[2].states[CapturePoint("norm")])


def test_speculators_float8_states_are_scaled_back(captured: Capture, tmp_path: Path) -> None:
    dump = open_foreign(write_speculators(captured, tmp_path / "dump", fp8=True))
    found, original = dump.sample(0).states["aux_2"], captured.samples[0].states[CapturePoint("layers.6")]
    assert float((found - original).norm() / original.norm()) < 0.05


def test_more_than_ten_samples_stay_in_order(captured: Capture, tmp_path: Path) -> None:
    folder = write_speculators(captured, tmp_path / "dump") / "hidden_states"
    (folder / "hs_2.safetensors").rename(folder / "hs_10.safetensors")
    assert [sample.id for sample in open_foreign(tmp_path / "dump")] == [
        f"hidden_states/hs_{i}" for i in ("0", "1", "10")
    ]


def test_a_batch_dimension_and_an_unread_last_token_are_taken_off(captured: Capture, tmp_path: Path) -> None:
    folder = write_request_folders(captured, tmp_path / "dump") / captured.samples[0].id
    for file in folder.glob("*.pt"):
        torch.save(torch.load(file)[None], file)
    sample = captured.samples[0]
    torch.save(torch.tensor([[*sample.input_ids.tolist(), sample.last_token_id]]), folder / "input_ids.pt")
    first = open_foreign(tmp_path / "dump").sample(0).slots()
    assert torch.equal(first.input_ids, sample.input_ids)
    assert first.states["aux_0"].ndim == 2


# Token ids


def without_ids(captured: Capture, path: Path) -> ForeignDump:
    write_state_lists(captured, path)
    for file in path.glob("*.json"):
        file.unlink()
    return open_foreign(path)


def test_states_without_token_ids_say_what_to_do(captured: Capture, tmp_path: Path) -> None:
    dump = without_ids(captured, tmp_path / "dump")
    with pytest.raises(MissingIds, match=r"has no token ids.*--ids FILE.*'p00000'"):
        dump.sample(0).slots()
    assert dump.sample(0).rows == len(captured.samples[0].input_ids)


@pytest.mark.parametrize("named", [True, False], ids=["by id", "in order"])
def test_token_ids_come_from_a_file_of_the_users(captured: Capture, tmp_path: Path, named: bool) -> None:
    without_ids(captured, tmp_path / "dump")
    lines = [
        {"input_ids": sample.input_ids.tolist()} | ({"id": sample.id} if named else {}) for sample in captured.samples
    ]
    ids = tmp_path / "ids.jsonl"
    ids.write_text("\n".join(json.dumps(line) for line in (reversed(lines) if named else lines)))
    dump = open_foreign(tmp_path / "dump", ids=ids)
    for sample, original in zip(dump, captured.samples, strict=True):
        assert torch.equal(sample.slots().input_ids, original.input_ids)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is no file of token ids"),
        ('{"ids": "1 2 3"}', "line 1: expected"),
        ('{"input_ids": [1.5]}', "with whole numbers"),
        ('{"input_ids": [1]}\n{"id": "a", "input_ids": [1]}', "either every line has an `id` or none"),
        ('{"input_ids": [1]}', "1 lines of ids for the 3 samples"),
        ("", "there is at least one"),
    ],
)
def test_a_file_of_ids_that_does_not_fit_is_refused(captured: Capture, tmp_path: Path, text: str, message: str) -> None:
    without_ids(captured, tmp_path / "dump")
    ids = tmp_path / "ids.jsonl"
    ids.write_text(text)
    with pytest.raises(DumpError, match=message):
        open_foreign(tmp_path / "dump", ids=ids)


# What is not known


def test_an_unknown_layout_lists_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "states.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(UnknownLayout) as caught:
        open_foreign(tmp_path)
    for words in ("manifest.json", "aux_0.pt", "*.ckpt", "hs_<i>.safetensors", "aux_hidden_states", "states.npy"):
        assert words in str(caught.value)
    assert all(f"{name}: " in str(caught.value) for name in LAYOUTS)


def test_a_forced_layout_is_the_only_one_that_is_tried(captured: Capture, tmp_path: Path) -> None:
    write_specforge(captured, tmp_path / "dump")
    with pytest.raises(UnknownLayout, match="speculators: ") as caught:
        open_foreign(tmp_path / "dump", layout="speculators")
    assert "specforge: " not in str(caught.value)
    with pytest.raises(UnknownLayout, match="no layout 'angelslim': known are request-folders, specforge"):
        open_foreign(tmp_path / "dump", layout="angelslim")
    assert open_foreign(tmp_path / "dump", layout="specforge").layout.name == "specforge"


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownLayout, match="does not exist"):
        open_foreign(tmp_path / "nothing")


# What cannot be


def _without_final(path: Path, sample: str) -> None:
    (path / sample / "final.pt").unlink()


def _with_two_finals(path: Path, sample: str) -> None:
    (path / sample / "hidden.pt").write_bytes((path / sample / "final.pt").read_bytes())


def _without_the_middle(path: Path, sample: str) -> None:
    (path / sample / "aux_1.pt").unlink()


def _with_fewer_rows(path: Path, sample: str) -> None:
    torch.save(torch.load(path / sample / "aux_1.pt")[:-2].clone(), path / sample / "aux_1.pt")


def _with_fewer_ids(path: Path, sample: str) -> None:
    torch.save(torch.load(path / sample / "input_ids.pt")[:-1].clone(), path / sample / "input_ids.pt")


def _with_many_ids(path: Path, sample: str) -> None:
    torch.save(torch.arange(500), path / sample / "input_ids.pt")


def _with_float_ids(path: Path, sample: str) -> None:
    torch.save(torch.rand(5), path / sample / "input_ids.pt")


def _with_negative_ids(path: Path, sample: str) -> None:
    torch.save(-torch.load(path / sample / "input_ids.pt"), path / sample / "input_ids.pt")


def _with_whole_numbers(path: Path, sample: str) -> None:
    torch.save(torch.load(path / sample / "aux_1.pt").long(), path / sample / "aux_1.pt")


def _with_another_width(path: Path, sample: str) -> None:
    for file in (path / sample).glob("*.pt"):
        if file.stem != "input_ids":
            torch.save(torch.load(file)[:, :32].clone(), file)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_final, r"one of final\.pt, .*hidden\.pt.*found none among aux_0\.pt"),
        (_with_two_finals, r"found final\.pt, hidden\.pt"),
        (_without_the_middle, r"2 aux files but no aux_1\.pt"),
        (_with_fewer_rows, r"the same shape \[T, H\]; found aux_0 \[\d+, 64\], aux_1"),
        (_with_fewer_ids, r"rows for \d+ token ids"),
        (_with_many_ids, r"rows for 500 token ids.*prefix cache"),
        (_with_float_ids, r"whole numbers \[T\]; found float32 \[5\]"),
        (_with_negative_ids, r"there is no token id -\d+"),
        (_with_whole_numbers, r"aux_1: expected float32.*found int64"),
        (_with_another_width, r"32 wide, float32; the first sample has .* 64 wide"),
    ],
)
def test_files_that_cannot_be_one_sample_are_refused(
    captured: Capture, tmp_path: Path, spoil: Callable[[Path, str], None], message: str
) -> None:
    path = write_request_folders(captured, tmp_path / "dump")
    spoil(path, captured.samples[1].id)
    with pytest.raises(DumpError, match=message):
        [sample.slots() for sample in open_foreign(path)]


def test_a_concatenation_that_is_no_multiple_of_the_width_is_refused(captured: Capture, tmp_path: Path) -> None:
    path = write_specforge(captured, tmp_path / "dump") / "rows_0-5000" / "data_0.ckpt"
    row = torch.load(path, weights_only=True)
    torch.save(row | {"aux_hidden_state": row["aux_hidden_state"][..., :100].clone()}, path)
    with pytest.raises(DumpError, match=r"aux_hidden_state is 100 wide, which is no multiple of the final state's 64"):
        open_foreign(tmp_path / "dump")


def test_a_file_of_another_kind_says_what_it_holds(captured: Capture, tmp_path: Path) -> None:
    folder = write_specforge(captured, tmp_path / "dump") / "rows_0-5000"
    torch.save({"model": {"weight": torch.rand(2, 2)}, "step": 3}, folder / "data_0.ckpt")
    with pytest.raises(DumpError, match=r"is not a row of SpecForge: .* found model, step"):
        open_foreign(tmp_path / "dump")
    torch.save({"\x1b]0;owned\x07": 3}, folder / "data_0.ckpt")
    with pytest.raises(DumpError, match=r"found '\\x1b\]0;owned\\x07'"):
        open_foreign(tmp_path / "dump")


def test_a_list_among_other_files_is_refused(captured: Capture, tmp_path: Path) -> None:
    path = write_state_lists(captured, tmp_path / "dump")
    torch.save({"step": 3}, path / "zz.pt")
    with pytest.raises(DumpError, match="holds no list of states, as the files beside it do; it holds a dict"):
        list(open_foreign(path))
