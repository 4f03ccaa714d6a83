"""Files that nobody should open without thinking: pickles with code, bombs, half files. Nothing of them is executed."""

import gzip
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3.dump.foreign import ForeignPickle
from eagle3.dump.foreign.loading import GZIP_ALLOWANCE, load_safetensors, load_saved
from eagle3.dump.manifest import DumpError
from tests.dumps import flip_bit
from tests.foreign import Code

pytestmark = pytest.mark.unit


def _saved(value: Any, path: Path) -> None:
    torch.save(value, path)


def _saved_with_protocol_4(value: Any, path: Path) -> None:
    torch.save(value, path, pickle_protocol=4)


def _saved_as_before_1_6(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


def _pickled(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value))


def _zipped(value: Any, path: Path) -> None:
    torch.save(value, path.with_suffix(""))
    path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (_saved, "state.pt"),
        (_saved_with_protocol_4, "state.pt"),
        (_saved_as_before_1_6, "state.pt"),
        (_pickled, "state.pt"),
        (_zipped, "state.ckpt.gz"),
    ],
)
def test_code_in_a_pickle_is_named_and_not_executed(tmp_path: Path, save: Any, name: str) -> None:
    proof, file = tmp_path / "it ran", tmp_path / name
    save({"input_ids": torch.arange(3), "hidden_state": Code(proof)}, file)
    with pytest.raises(ForeignPickle, match=rf"{name}.*names code to run: (posix|nt)\.mkdir\. Nothing of it was exec"):
        load_saved(file)
    assert not proof.exists()
    if save is _pickled:  # what was planted does run where a pickle is trusted
        pickle.loads(file.read_bytes())
        assert proof.exists()


def test_names_in_a_pickle_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(b"cos\nsystem\x1b[2J\x1b]0;owned\x07\n.")
    with pytest.raises(ForeignPickle, match=r"names code to run: 'os\.system\\x1b") as caught:
        load_saved(tmp_path / "state.pt")
    assert str(caught.value).isprintable()


def test_a_file_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state.pt").mkdir()
    with pytest.raises(DumpError, match=r"state\.pt cannot be read: Is a directory"):
        load_saved(tmp_path / "state.pt")


def test_a_numpy_array_in_a_pickle_is_named(tmp_path: Path) -> None:
    torch.save({"input_ids": torch.arange(3).numpy()}, tmp_path / "state.pt")
    with pytest.raises(ForeignPickle, match=r"numpy\._core\.multiarray\._reconstruct"):
        load_saved(tmp_path / "state.pt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("name", ["state.pt", "state.ckpt.gz"])
def test_a_truncated_file_is_damaged_and_says_so(tmp_path: Path, name: str, share: float) -> None:
    file = tmp_path / name
    (_zipped if name.endswith("gz") else _saved)({"input_ids": torch.randint(0, 9, (5000,))}, file)
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(DumpError, match=r"state\..*(is not a whole file|cannot be (read|unpacked)).*copy it again"):
        load_saved(file)


def test_a_file_that_unpacks_without_end_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    file = tmp_path / "data_0.ckpt.gz"
    file.write_bytes(gzip.compress(bytes(64 * GZIP_ALLOWANCE)))
    before = set(tmp_path.iterdir())
    with pytest.raises(DumpError, match="unpacks to more than 16 times its size"):
        load_saved(file)
    assert set(tmp_path.iterdir()) == before


def test_an_archive_with_compressed_entries_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(2**20)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for entry in plain.infolist():
            bomb.writestr(entry.filename, plain.read(entry))
    assert (tmp_path / "bomb.pt").stat().st_size < 2**15
    with pytest.raises(DumpError, match="holds compressed entries"):
        load_saved(tmp_path / "bomb.pt")


def test_one_value_that_stands_for_a_terabyte_is_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(1).expand(2**20, 2**18), tmp_path / "state.pt")
    with pytest.raises(DumpError, match="larger than the file"):
        load_saved(tmp_path / "state.pt")


def test_lists_inside_lists_a_billion_times_over_are_walked_once(tmp_path: Path) -> None:
    value: Any = [0] * 1000
    for _ in range(3):
        value = [value] * 1000
    torch.save({"input_ids": value}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 16 * 1024
    begun = time.monotonic()
    load_saved(tmp_path / "x.pt")
    assert time.monotonic() - begun < 10, "it is 10^12 numbers"


def test_tensors_are_looked_at_wherever_they_lie(tmp_path: Path) -> None:
    shared = [torch.zeros(1).expand(1000, 1000)]
    for number, value in enumerate((shared, {"a": [{"b": shared}]}, [[1], (2, shared), shared])):
        torch.save(value, tmp_path / f"{number}.pt")
        with pytest.raises(DumpError, match="larger than the file"):
            load_saved(tmp_path / f"{number}.pt")


def test_a_file_of_endless_parts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.dump.foreign.loading.MAX_OBJECTS", 100)
    torch.save([[0] * 60, [0] * 30], tmp_path / "x.pt")
    load_saved(tmp_path / "x.pt")
    torch.save([[0] * 60, [0] * 60], tmp_path / "x.pt")
    with pytest.raises(DumpError, match="holds more than 100 things"):
        load_saved(tmp_path / "x.pt")


@pytest.mark.parametrize("tensor", [torch.eye(8).to_sparse(), torch.zeros(8, device="meta")], ids=["sparse", "meta"])
def test_only_plain_tensors_are_read(tmp_path: Path, tensor: torch.Tensor) -> None:
    torch.save([tensor], tmp_path / "state.pt")
    with pytest.raises(DumpError, match="plain tensors were expected"):
        load_saved(tmp_path / "state.pt")


def test_tensors_are_mapped_and_not_read(tmp_path: Path) -> None:
    """What is written into the file after it was opened shows in the tensor: nothing was copied."""
    torch.save({"states": torch.zeros(2**16)}, tmp_path / "state.pt")
    states = load_saved(tmp_path / "state.pt")["states"]
    with (tmp_path / "state.pt").open("r+b") as file:
        file.seek(2**17)
        file.write(b"\x01" * 2**16)
    assert int((states != 0).sum()) >= 2**14


def test_an_unpacked_file_is_gone_and_its_tensors_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    state = torch.rand(100, 16)
    _zipped({"hidden_state": state}, tmp_path / "data_0.ckpt.gz")
    loaded = load_saved(tmp_path / "data_0.ckpt.gz")
    assert not list(tmp_path.glob("eagle3-*"))
    assert torch.equal(loaded["hidden_state"], state)


def test_a_safetensors_file_is_read_by_name(tmp_path: Path) -> None:
    file = tmp_path / "hs_0.safetensors"
    save_file({"hidden_states": torch.rand(3, 2, 4)}, file)
    with pytest.raises(DumpError, match="holds no token_ids; it holds hidden_states"):
        load_safetensors(file, ("hidden_states", "token_ids"))
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    with pytest.raises(DumpError, match="is not a whole safetensors file"):
        load_safetensors(file, ("hidden_states",))
    file.write_bytes(data)
    flip_bit(file, at=0.0)
    with pytest.raises(DumpError, match="is not a whole safetensors file"):
        load_safetensors(file, ("hidden_states",))
