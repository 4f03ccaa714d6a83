"""What `eagle3 dump` refuses, and how: wrong targets, damaged and malicious files, wrong usage. No verdict without a
check: exit code 3, and a message that says what to do.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.dump.foreign import LAYOUTS
from eagle3.dump.writer import CapturedSample
from flows.cli_dump import LayoutName
from tests.command import dump
from tests.dumps import Capture, capture, flip_bit, with_states, write_dump
from tests.foreign import Code, write_specforge, write_state_lists
from tests.targets import make_llama, make_qwen3

pytestmark = pytest.mark.unit

REFUTED, USAGE, NOT_CHECKED = 1, 2, 3


@pytest.fixture(scope="module")
def captured(tiny_llama: Path) -> Capture:
    return capture(tiny_llama, num_samples=4, max_new_tokens=16)


@pytest.fixture(scope="module")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape, other weights."""
    return make_llama(tmp_path_factory.mktemp("targets") / "other-llama", seed=7)


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


# The wrong target


def test_another_checkpoint_of_the_same_shape_is_refused_for_our_own_dump(
    captured: Capture, tmp_path: Path, other_target: Path
) -> None:
    write_dump(captured, tmp_path / "dump")
    said = dump("attribute", tmp_path / "dump", "--target", other_target)
    assert said.code == NOT_CHECKED
    assert "is not the target whose states the dump holds" in said.err
    assert "weights_sha256" in said.err
    accepted = dump("attribute", tmp_path / "dump", "--target", other_target, "--accept-target")
    assert accepted.code == REFUTED
    assert "holds none of the target's tensors" in accepted.out


def test_another_checkpoint_is_found_out_from_a_foreign_dump(
    captured: Capture, tmp_path: Path, other_target: Path
) -> None:
    path = write_specforge(captured, tmp_path / "dump")
    for options in (("--json",), ("--claim", "layers.2,layers.4,layers.6")):
        said = dump("attribute", path, "--target", other_target, *options)
        assert (said.code, said.out) == (NOT_CHECKED, "")
        assert f"{path} is of another target than {other_target}: none of its 4 slots holds one of" in said.err


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: make_llama(folder, seed=5, vocab_size=640),
        lambda folder: make_llama(folder, seed=5, num_hidden_layers=4),
        make_qwen3,
    ],
    ids=["a wider vocabulary", "fewer layers", "another family"],
)
def test_a_target_of_another_vocabulary_depth_or_family_is_found_out(
    captured: Capture, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    target = make(tmp_path / "target")
    said = dump("attribute", write_state_lists(captured, tmp_path / "dump"), "--target", target)
    assert (said.code, said.out) == (NOT_CHECKED, "")
    assert f"is of another target than {target}" in said.err


def test_a_target_with_a_smaller_vocabulary_is_found_out(captured: Capture, tmp_path: Path) -> None:
    narrow = make_llama(tmp_path / "narrow", vocab_size=64)
    said = dump("attribute", write_specforge(captured, tmp_path / "dump"), "--target", narrow)
    assert said.code == NOT_CHECKED
    assert f"{narrow} has ids 0 ... 63: the dump is of another target" in said.err


def test_a_claim_of_a_layer_that_the_target_does_not_have_is_named(captured: Capture, tmp_path: Path) -> None:
    path = write_specforge(captured, tmp_path / "dump")
    said = dump("attribute", path, "--target", captured.target, "--claim", "layers.2,layers.4,layers.8")
    assert said.code == NOT_CHECKED
    assert f"the command line claims layers.8, and the target {captured.target} has 8 decoder layers" in said.err


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_slots_of_which_few_rows_are_right_are_refuted_and_no_other_targets(
    captured: Capture, tmp_path: Path, share: float
) -> None:
    def empty(sample: CapturedSample) -> CapturedSample:
        states = {str(point): state.clone() for point, state in sample.states.items()}
        for state in states.values():
            state[: round(share * len(state))] = 0
        return with_states(sample, states)

    spoilt = replace(captured, samples=tuple(map(empty, captured.samples)))
    said = dump("attribute", write_specforge(spoilt, tmp_path / "dump"), "--target", captured.target)
    assert said.code == REFUTED
    assert "another target" not in said.out + said.err


def test_a_target_of_another_shape_is_refused(captured: Capture, tmp_path: Path, tiny_llama: Path) -> None:
    wide = tmp_path / "wide"
    shutil.copytree(tiny_llama, wide)
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    write_dump(captured, tmp_path / "ours")
    for path in (tmp_path / "ours", write_specforge(captured, tmp_path / "theirs")):
        said = dump("attribute", path, "--target", wide)
        assert said.code == NOT_CHECKED
        assert "states of width 128" in said.err
        assert "states of width 64" in said.err


def test_ids_outside_the_targets_vocabulary_are_another_tokenizers(captured: Capture, tmp_path: Path) -> None:
    path = write_specforge(captured, tmp_path / "dump")
    row = torch.load(path / "rows_0-5000" / "data_0.ckpt", weights_only=True)
    row["input_ids"][3] = 70_000
    torch.save(row, path / "rows_0-5000" / "data_0.ckpt")
    said = dump("attribute", path, "--target", captured.target)
    assert said.code == NOT_CHECKED
    assert f"token id 70000, and {captured.target} has ids 0 ... 511" in said.err


def test_a_target_without_weights_is_refused(captured: Capture, tmp_path: Path, tiny_llama: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_llama, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    said = dump("attribute", write_specforge(captured, tmp_path / "dump"), "--target", bare)
    assert said.code == NOT_CHECKED
    assert "has no weights: expected model.safetensors" in said.err
    said = dump("attribute", tmp_path / "dump", "--target", tmp_path / "nowhere")
    assert said.code == NOT_CHECKED
    assert "there is no folder" in said.err


# Damage and malice


def commands(path: Path, captured: Capture) -> dict[str, list[str | Path]]:
    return {
        "verify": ["verify", path],
        "inspect": ["inspect", path, "--statistics"],
        "attribute": ["attribute", path, "--target", captured.target],
        "compare": ["compare", path, path],
    }


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_a_damaged_shard_is_refuted_by_verify_and_stops_the_others(
    captured: Capture, tmp_path: Path, damage: str
) -> None:
    manifest = write_dump(captured, tmp_path / "dump")
    shard = tmp_path / "dump" / manifest.shards[0].name
    if damage == "flipped":
        flip_bit(shard)
    else:
        shard.write_bytes(shard.read_bytes()[:-1000])
    for name, arguments in commands(tmp_path / "dump", captured).items():
        said = dump(*arguments)
        assert said.code == (REFUTED if name == "verify" else NOT_CHECKED), (name, said)
        assert shard.name in said.out + said.err
        assert ("sha256" if damage == "flipped" else "truncated") in said.out + said.err


@pytest.mark.parametrize("version", [1, 99])
def test_a_manifest_of_another_schema_version_cannot_be_checked(
    captured: Capture, tmp_path: Path, version: int
) -> None:
    write_dump(captured, tmp_path / "dump")
    file = tmp_path / "dump" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": version}))
    for arguments in commands(tmp_path / "dump", captured).values():
        said = dump(*arguments)
        assert said.code == NOT_CHECKED
        assert f"schema version {version}" in said.err


def test_code_in_a_foreign_pickle_is_named_and_not_executed(captured: Capture, tmp_path: Path) -> None:
    path = write_specforge(captured, tmp_path / "dump")
    row = torch.load(path / "rows_0-5000" / "data_2.ckpt", weights_only=True)
    torch.save(row | {"note": Code(tmp_path / "it ran")}, path / "rows_0-5000" / "data_2.ckpt")
    for name, arguments in commands(path, captured).items():
        if name != "verify":
            said = dump(*arguments)
            assert said.code == NOT_CHECKED
            assert "data_2.ckpt: its pickle names code to run: posix.mkdir. Nothing of it was executed" in said.err
    assert not (tmp_path / "it ran").exists()


def test_the_real_command_says_no_more_than_the_message(captured: Capture, tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    torch.save(Code(tmp_path / "it ran"), tmp_path / "dump" / "state.pt")
    command = [sys.executable, "-c", "from flows.cli import main; main()", "dump", "inspect", str(tmp_path / "dump")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (NOT_CHECKED, "")
    assert done.stderr.startswith("could not be checked: ")
    assert "posix.mkdir" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "it ran").exists()


def test_names_in_a_foreign_file_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    torch.save({"\x1b]0;owned\x07": 1}, tmp_path / "data_0.ckpt")
    said = dump("inspect", tmp_path)
    assert said.code == NOT_CHECKED
    assert "\\x1b]0;owned\\x07" in said.err
    assert "\x1b" not in said.err


@pytest.mark.parametrize("command", ["inspect", "attribute"])
def test_a_folder_that_is_no_dump_says_what_was_looked_for(tmp_path: Path, command: str) -> None:
    said = dump(command, tmp_path, *(["--target", tmp_path] if command == "attribute" else []))
    assert said.code == NOT_CHECKED
    assert "Looked for a manifest.json (our own), request-folders: aux_0.pt" in said.err


def test_a_store_that_does_not_exist_cannot_be_checked(tmp_path: Path) -> None:
    for command in ("verify", "inspect", "attribute"):
        said = dump(command, (tmp_path / "nothing").as_uri())
        assert said.code == NOT_CHECKED, command


# What has no manifest


def test_verify_says_what_a_path_without_a_manifest_is(captured: Capture, tmp_path: Path) -> None:
    write_dump(captured, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "manifest.json").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no dump")
    foreign = write_specforge(captured, tmp_path / "theirs")
    expected = {
        tmp_path / "nowhere": "nowhere does not exist",
        tmp_path / "unfinished": "which is written last: its extraction or its copy did not finish",
        tmp_path / "empty": "empty has no manifest.json: it is no dump",
        tmp_path / "notes.txt": "notes.txt is a file: name the folder that holds manifest.json",
        foreign: "of the layout specforge (SpecForge (scripts/prepare_hidden_states.py)): only dumps that eagle3 "
        "writes have digests to compare with. `eagle3 dump inspect` says what it is",
    }
    for path, words in expected.items():
        said = dump("verify", path)
        assert (said.code, said.out) == (NOT_CHECKED, ""), path
        assert words in said.err


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_verify_gives_its_advice_once(captured: Capture, tmp_path: Path, damage: str) -> None:
    manifest = write_dump(captured, tmp_path / "dump")
    shard = tmp_path / "dump" / manifest.shards[0].name
    if damage == "flipped":
        flip_bit(shard)
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1000])
    else:
        shard.unlink()
    said = dump("verify", tmp_path / "dump")
    assert said.code == REFUTED
    assert shard.name in said.out
    assert said.out.lower().count("fetch") == said.out.lower().count("extract again") == 1


# Usage


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--claim", "layers.2,layers.4"], "2 points are claimed (layers.2, layers.4) for a dump of aux_0, aux_1"),
        (["--claim", "2,30,58"], "unknown capture point '2'"),
        (["--layout", "angelslim"], "'angelslim' is not one of"),
        (["--reference", "guess"], "'guess' is not one of"),
    ],
)
def test_wrong_usage_exits_with_2(captured: Capture, tmp_path: Path, options: list[str], message: str) -> None:
    path = write_specforge(captured, tmp_path / "dump")
    said = dump("attribute", path, "--target", captured.target, *options)
    assert said.code == USAGE
    assert message in " ".join(said.err.replace("│", " ").split())


def test_the_command_knows_every_layout() -> None:
    assert {name.value for name in LayoutName} == set(LAYOUTS)
