"""`eagle3 checkpoint`: exit codes, what is printed, and what stays as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from eagle3.drafter.checkpoint import load_checkpoint, save_checkpoint
from flows.cli import app
from tests.drafters import ENGINE_IDS, HIDDEN, VOCAB, make_contract, make_drafter, make_vocab
from tests.unit.test_opening import IDS, LLAMA, TARGET, public, tensors_of

pytestmark = pytest.mark.unit


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    folder, made = tmp_path / "drafter", make_drafter()
    save_checkpoint(folder, made, make_vocab(), make_contract(made, make_vocab()), ENGINE_IDS, coverage=0.875)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET | {"tie_word_embeddings": True}))
    save_file({"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}, folder / "model.safetensors")
    return folder


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, words)])


def as_json(*words: object) -> Any:
    result = run(*words, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def test_inspect_says_what_a_drafter_is(drafter: Path) -> None:
    result = run("inspect", drafter)
    assert result.exit_code == 0, result.output
    for part in ("LlamaForCausalLMEagle3", "layers.1, layers.3, layers.5", "48 of 64 tokens (75.0%), 87.5% of the"):
        assert part in result.stdout
    told = as_json("inspect", drafter)
    assert told["weights_sha256"] == load_checkpoint(drafter).contract.weights_sha256
    assert told["tensors"]["fc.weight"] == [32, 96]


def test_a_drafter_may_be_named_by_its_uri(drafter: Path) -> None:
    assert as_json("inspect", drafter.as_uri()) == as_json("inspect", drafter)


def test_inspect_refutes_a_damaged_drafter_and_leaves_it_alone(drafter: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(drafter / "model.safetensors").items()}
    tensors["fusion.weight"] = tensors.pop("fc.weight")
    save_file(tensors, drafter / "model.safetensors")
    before = (drafter / "model.safetensors").read_bytes()
    result = run("inspect", drafter)
    assert result.exit_code == 1
    assert "refuted:" in result.stderr
    assert "missing fc.weight [32, 96] (renamed? fusion.weight has its shape)" in result.stderr
    assert (drafter / "model.safetensors").read_bytes() == before


def test_what_cannot_be_read_is_no_verdict(drafter: Path, tmp_path: Path) -> None:
    assert run("inspect", tmp_path / "nowhere").exit_code == 3
    (drafter / "model.safetensors").rename(tmp_path / "weights")
    result = run("inspect", drafter)
    assert (result.exit_code, "could not be checked" in result.stderr) == (3, True)
    (tmp_path / "weights").rename(drafter / "model.safetensors")
    (drafter / "contract.json").unlink()
    result = run("inspect", drafter)
    assert (result.exit_code, "its contract.json is missing" in result.stderr) == (3, True)


def test_export_moves_a_drafter_to_another_engine_and_back(drafter: Path, tmp_path: Path) -> None:
    result = run("export", drafter, tmp_path / "v", "--to", "vllm", "--to-version", "0.33.0")
    assert result.exit_code == 0, result.output
    assert "vllm 0.33.0 LlamaForCausalLM [2, 4, 6]" in result.stdout
    told = as_json("export", tmp_path / "v", tmp_path / "s", "--to", "sglang")
    assert told["engine_ids"] == ENGINE_IDS.model_dump(mode="json")
    for name in ("model.safetensors", "config.json", "contract.json"):
        assert (tmp_path / "s" / name).read_bytes() == (drafter / name).read_bytes()
    same = run("diff", drafter, tmp_path / "v")
    assert (same.exit_code, same.stdout) == (0, "the same drafter; 15 tensors equal bit for bit\n")


def test_export_never_overwrites_and_leaves_nothing_half_done(drafter: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in drafter.iterdir()}
    result = run("export", drafter, drafter, "--to", "vllm")
    assert result.exit_code != 0
    assert {path.name: path.read_bytes() for path in drafter.iterdir()} == before
    result = run("export", drafter, tmp_path / "x", "--to", "vllm", "--to-version", "0.1.0")
    assert result.exit_code != 0
    assert not (tmp_path / "x").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"drafter"}, "nothing partial"


def test_the_embedding_comes_along_only_on_request(drafter: Path, target: Path, tmp_path: Path) -> None:
    assert "embed_tokens.weight" not in load_file(drafter / "model.safetensors")
    assert run("export", drafter, tmp_path / "a", "--to", "sglang", "--with-embedding").exit_code == 2
    result = run("export", drafter, tmp_path / "a", "--to", "sglang", "--with-embedding", "--target", target)
    assert result.exit_code == 0, result.output
    found = load_file(tmp_path / "a" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(found, load_file(target / "model.safetensors")["model.embed_tokens.weight"])


def test_somebody_elses_drafter_needs_its_engine_version_and_target(target: Path, tmp_path: Path) -> None:
    folder = public(tmp_path / "public", LLAMA, tensors_of(make_drafter()))
    assert run("inspect", folder).exit_code == 0, "it may be looked at"
    assert run("export", folder, tmp_path / "out", "--to", "vllm").exit_code == 2
    assert run("export", folder, tmp_path / "out", "--to", "vllm", "--engine", "sglang").exit_code == 2
    named = ("--engine", "sglang", "--engine-version", "0.5.23", "--target", target)
    result = run("export", folder, tmp_path / "out", "--to", "vllm", *named)
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config[IDS] == [2, 4, 6]
    assert not (tmp_path / "out" / "contract.json").exists(), "nothing proves what it was trained on"
    assert as_json("diff", folder, tmp_path / "out")["same"] is True


def test_a_default_list_must_be_accepted_in_so_many_words(target: Path, tmp_path: Path) -> None:
    folder = public(tmp_path / "public", LLAMA | {"eagle_config": {}}, tensors_of(make_drafter()))
    named = ("--engine", "sglang", "--engine-version", "0.5.23", "--target", target)
    result = run("inspect", folder, *named)
    assert (result.exit_code, "would capture its default list" in result.stderr) == (1, True)
    told = as_json("inspect", folder, *named, "--accept-default-layers")
    assert told["points"] == ["layers.1", "layers.3", "layers.4"]
    assert "accepted" in told["notes"][0]


def test_diff_says_where_two_drafters_part(drafter: Path, tmp_path: Path) -> None:
    other, made = tmp_path / "other", make_drafter(seed=1)
    save_checkpoint(other, made, make_vocab(), make_contract(made, make_vocab()), ENGINE_IDS)
    result = run("diff", drafter, other)
    assert result.exit_code == 1
    assert "fc.weight: 100.0% of the values differ" in result.stdout
    told = as_json("diff", drafter, other)
    assert (told["same"], told["equal_tensors"]) == (False, 2)


@pytest.mark.parametrize("command", ["inspect", "diff", "export"])
def test_help_shows_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert "--json" in result.stdout
