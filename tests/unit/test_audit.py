"""The contract check names every difference between what a drafter was trained for and what a server runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3.audit import Deployment, Finding, audit, delivered
from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.contract import DrafterContract
from eagle3.conventions import ConventionError, EngineIds, ids_of
from eagle3.drafter.checkpoint import CheckpointError, checkpoint_tensors, contract_for, save_checkpoint
from eagle3.drafter.model import Drafter
from eagle3.drafter.served import read_served
from eagle3.drafter.vocab import VocabMap
from eagle3.dump.manifest import TargetIdentity, TokenizerIdentity
from eagle3.refs import DumpRef
from tasks.variants import exchanged, with_ids, with_tensors
from tests.drafters import HIDDEN, VOCAB, make_drafter, make_vocab

pytestmark = pytest.mark.unit

SMOLLM2 = ("layers.2", "layers.15", "layers.27")
KIMI = ("layers.2", "layers.30", "layers.58")
VERSION = "0.5.23"


class Saved:
    """A drafter that is saved for a target of a class and depth, and the deployment of its folder."""

    def __init__(self, folder: Path, points: tuple[str, ...], model_class: str, num_layers: int) -> None:
        self.root = folder
        self.drafter: Drafter = make_drafter()
        self.vocab: VocabMap = make_vocab()
        self.target = TargetIdentity(
            name="made-up",
            model_class=model_class,
            num_layers=num_layers,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            config_sha256="a" * 64,
            weights_sha256="b" * 64,
        )
        self.points = tuple(CapturePoint(point) for point in points)
        self.contract: DrafterContract = contract_for(
            self.drafter,
            self.vocab,
            capture=CaptureSpec(aux=self.points),
            target=self.target,
            tokenizer=TokenizerIdentity(sha256="c" * 64),
            dump=DumpRef(uri="s3://eagle3/dumps/made-up", sha256="d" * 64),
            report_sha256="e" * 64,
        )
        self.folder = folder / "drafter"
        save_checkpoint(self.folder, self.drafter, self.vocab, self.contract, self.ids(VERSION))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return checkpoint_tensors(self.drafter, self.vocab)

    def ids(self, version: str) -> EngineIds:
        target = self.target
        return ids_of(
            self.points,
            engine="sglang",
            version=version,
            model_class=target.model_class,
            num_layers=target.num_layers,
        )

    def deployed(self, folder: Path | None = None, **changes: object) -> Deployment:
        right = Deployment(
            version=VERSION, target=self.target, drafter=read_served(folder or self.folder), algorithm="EAGLE3"
        )
        return replace(right, **changes)

    def with_ids(self, *ids: int) -> Deployment:
        return self.deployed(with_ids(self.folder, self.root / "other ids", ids))

    def with_tensors(self, tensors: dict[str, Tensor]) -> Deployment:
        return self.deployed(with_tensors(self.folder, self.root / "other tensors", tensors))

    def with_config(self, **changes: object) -> Deployment:
        copy = with_tensors(self.folder, self.root / "other config", self.tensors)
        config = json.loads((copy / "config.json").read_text()) | changes
        (copy / "config.json").write_text(json.dumps(config))
        return self.deployed(copy)

    def one(self, deployment: Deployment, *, original: bool = False) -> Finding:
        """The only finding."""
        findings = audit(self.contract, deployment, original=self.tensors if original else None)
        assert len(findings) == 1, findings
        return findings[0]


@pytest.fixture
def llama(tmp_path: Path) -> Saved:
    return Saved(tmp_path / "llama", SMOLLM2, "LlamaForCausalLM", 30)


@pytest.fixture
def kimi(tmp_path: Path) -> Saved:
    return Saved(tmp_path / "kimi", KIMI, "KimiK25ForConditionalGeneration", 61)


def test_a_deployment_as_it_was_trained_has_no_finding(llama: Saved, kimi: Saved) -> None:
    assert audit(llama.contract, llama.deployed()) == ()
    assert audit(llama.contract, llama.deployed(layers_to_capture=(3, 16, 28)), original=llama.tensors) == ()
    assert audit(kimi.contract, kimi.deployed()) == ()


def test_the_wrong_fix_is_named_with_the_value_that_mends_it(llama: Saved) -> None:
    deployment = llama.with_ids(-1, 2, 15)
    assert delivered(deployment) == ("embed", "layers.2", "layers.15")
    finding = llama.one(deployment)
    assert finding.subject == "layers"
    assert "delivers embed, layers.2, layers.15" in finding.wrong
    assert "trained on layers.2, layers.15, layers.27" in finding.wrong
    assert "[2, 15, 27]" in finding.cure
    assert "whose -1 captures the embedding" in finding.causes[0]
    assert "\n" not in str(finding)


def test_the_wrong_fix_is_named_in_the_ids_of_the_family_that_was_served(kimi: Saved) -> None:
    finding = kimi.one(kimi.with_ids(0, 3, 31))
    assert "delivers embed, layers.2, layers.30" in finding.wrong
    assert "ids like [0, 3, 31], whose 0 captures the embedding" in finding.causes[0]
    assert "[3, 31, 59]" in finding.causes[0]


def test_one_too_high_on_the_deepseek_family_has_a_cause_too(kimi: Saved) -> None:
    finding = kimi.one(kimi.with_ids(4, 32, 60))
    assert "each of the ids [4, 32, 60] is one too high" in finding.causes[0]
    assert "[3, 31, 59]" in finding.cure


def test_every_id_one_too_high_is_named_with_the_slip_that_explains_it(llama: Saved) -> None:
    finding = llama.one(llama.with_ids(3, 16, 28))
    assert "delivers layers.3, layers.16, layers.28" in finding.wrong
    assert "[2, 15, 27]" in finding.cure
    assert finding.causes[0].startswith("Ids [3, 16, 28] mean layers.2, layers.15, layers.27 in ")
    assert "vLLM" in finding.causes[0]


def test_what_the_live_model_captures_counts_more_than_what_the_ids_should_mean(llama: Saved) -> None:
    """A fork that means something else by the right ids."""
    finding = llama.one(llama.deployed(layers_to_capture=(2, 15, 27)))
    assert "delivers layers.1, layers.14, layers.26" in finding.wrong
    assert audit(llama.contract, llama.deployed(version="0.6.0+fork", layers_to_capture=(3, 16, 28))) == ()


def test_a_version_that_nobody_checked_needs_the_live_models_word(llama: Saved) -> None:
    finding = llama.one(llama.deployed(version="0.6.0"))
    assert "0.6.0" in finding.wrong


def test_a_list_of_the_deepseek_family_for_an_older_sglang_is_named_by_the_version(kimi: Saved) -> None:
    old = kimi.ids("0.5.12").ids
    assert old == (2, 30, 58)
    served = kimi.with_ids(*old)
    finding = kimi.one(served)
    assert "delivers layers.1, layers.29, layers.57" in finding.wrong
    assert finding.causes[0].startswith("Ids [2, 30, 58] mean layers.2, layers.30, layers.58 in SGLang up to 0.5.12")
    assert "layers.1, layers.29, layers.57 in SGLang from 0.5.13 on" in finding.causes[0]
    assert "[3, 31, 59]" in finding.cure
    assert audit(kimi.contract, replace(served, version="0.5.12")) == ()


def test_ids_that_the_engine_never_meets_are_named(kimi: Saved) -> None:
    finding = kimi.one(kimi.with_ids(-1, 2, 30))
    assert "silently deliver 2 states instead of 3" in finding.wrong
    assert "[3, 31, 59]" in finding.cure


@pytest.mark.parametrize("eagle", [{}, {"eagle_aux_hidden_state_layers": [2, 15, 27]}], ids=["missing", "misspelt"])
def test_missing_ids_are_named_with_the_default_that_the_engine_takes(llama: Saved, eagle: dict[str, object]) -> None:
    finding = llama.one(llama.with_config(eagle_config=eagle))
    assert "falls back to its default list and delivers layers.1, layers.14, layers.26" in finding.wrong
    assert "eagle_config.eagle_aux_hidden_state_layer_ids [2, 15, 27]" in finding.cure


def test_missing_ids_are_a_finding_also_where_the_default_is_right(tmp_path: Path) -> None:
    default = Saved(tmp_path, ("layers.1", "layers.14", "layers.26"), "LlamaForCausalLM", 30)
    assert "happen to be the right ones" in default.one(default.with_config(eagle_config={})).wrong


def test_the_eagle_flag_is_named_with_the_width_that_it_delivers(llama: Saved) -> None:
    finding = llama.one(llama.deployed(algorithm="EAGLE"))
    assert finding.subject == "algorithm"
    assert f"{HIDDEN} values instead of 3 captured states ({3 * HIDDEN})" in finding.wrong
    assert finding.cure == "Start the server with --speculative-algorithm EAGLE3."


def test_speculation_that_is_off_is_named(llama: Saved) -> None:
    assert "drafts nothing" in llama.one(llama.deployed(algorithm=None)).wrong


def test_exchanged_slots_are_named_where_the_original_tensors_are_at_hand(llama: Saved) -> None:
    deployment = llama.with_tensors(exchanged(llama.tensors, 3, 1, 2))
    finding = llama.one(deployment)
    assert finding.subject == "weights"
    assert "not those of the contract" in finding.wrong
    assert finding.causes == ()
    told = llama.one(deployment, original=True)
    assert "changed fc.weight" in told.wrong
    assert "it reads its slots as layers.2, layers.27, layers.15, and gets layers.2, layers.15, layers.27" in str(told)


def test_other_weights_are_named_by_tensor_without_a_guess(llama: Saved) -> None:
    tensors = llama.tensors
    tensors["norm.weight"] = tensors["norm.weight"] * 2
    tensors["fc_proj.weight"] = tensors.pop("fc.weight")
    findings = audit(llama.contract, llama.with_tensors(tensors), original=llama.tensors)
    assert [finding.subject for finding in findings] == ["width", "weights"]
    assert "fc.weight of the served drafter is missing" in findings[0].wrong
    assert "changed norm.weight; missing fc.weight; added fc_proj.weight" in findings[1].wrong
    assert findings[1].causes == ()


def test_a_drafter_in_other_types_is_one_of_other_weights_and_no_crash(llama: Saved) -> None:
    tensors = llama.tensors
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.float8_e4m3fn)
    assert "changed norm.weight" in llama.one(llama.with_tensors(tensors), original=True).wrong


def test_a_drafter_of_another_width_is_named(llama: Saved) -> None:
    tensors = llama.tensors
    tensors["fc.weight"] = tensors["fc.weight"][:, :HIDDEN].contiguous()
    assert (
        f"takes {HIDDEN} values; 3 slots of {HIDDEN} are {3 * HIDDEN}"
        in audit(llama.contract, llama.with_tensors(tensors))[0].wrong
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t | {"d2t": t["t2d"].nonzero()[:, 0]}, "holds target ids instead of offsets"),
        (lambda t: t | {"d2t": torch.arange(len(t["d2t"]))}, "maps draft id i to target id 2i"),
        (lambda t: {name: tensor for name, tensor in t.items() if name != "d2t"}, "has no d2t"),
        (lambda t: t | _other_map(), "other tokens than the 48"),
    ],
    ids=["ids instead of offsets", "arange", "missing", "another map"],
)
def test_a_wrong_draft_vocabulary_is_named_by_the_mistake_it_looks_like(
    llama: Saved, change: object, sentence: str
) -> None:
    findings = audit(llama.contract, llama.with_tensors(change(llama.tensors)))
    assert [finding.subject for finding in findings] == ["vocabulary", "weights"]
    assert sentence in findings[0].wrong


def _other_map() -> dict[str, Tensor]:
    other = make_vocab(seed=1)
    return {"d2t": other.d2t, "t2d": other.t2d}


def test_norm_flags_of_another_training_are_named(llama: Saved) -> None:
    finding = llama.one(llama.with_config(fc_norm=True, norm_output=True))
    assert finding.subject == "norm"
    assert "fc_norm True instead of False, norm_output True instead of False" in finding.wrong
    assert finding.cure.endswith("fc_norm False, norm_output False.")


def test_another_target_is_named_by_the_fields_that_differ(llama: Saved) -> None:
    other = llama.target.model_copy(update={"weights_sha256": "f" * 64, "name": "fine-tuned"})
    finding = llama.one(llama.deployed(target=other))
    assert finding.subject == "target"
    assert "weights_sha256 ffffffffffffffff instead of bbbbbbbbbbbbbbbb" in finding.wrong
    renamed = llama.target.model_copy(update={"name": "renamed", "revision": "main"})
    assert audit(llama.contract, llama.deployed(target=renamed)) == ()


def test_several_mistakes_are_several_findings_the_gravest_first(llama: Saved) -> None:
    deployment = replace(llama.with_ids(-1, 2, 15), algorithm="EAGLE")
    assert [finding.subject for finding in audit(llama.contract, deployment)] == ["algorithm", "layers"]


def test_a_folder_that_cannot_be_served_is_an_error_and_no_finding(llama: Saved, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_served(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="expected a list of whole numbers"):
        llama.with_config(eagle_config={"eagle_aux_hidden_state_layer_ids": "2,15,27"})


def test_what_is_delivered_without_a_live_model_follows_the_convention(kimi: Saved) -> None:
    assert delivered(kimi.deployed()) == KIMI
    with pytest.raises(ConventionError):
        delivered(kimi.deployed(version="0.6.0"))
