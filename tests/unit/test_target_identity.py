"""Who a target is: digests that follow the content, a cache that never lies, code that runs only with consent."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from eagle3.digests import sha256_bytes, sha256_file
from eagle3.target import Target, TargetError
from eagle3.target import digest_cache as digest_cache_module
from eagle3.target.digest_cache import CACHE_NAME, DigestCache
from tests import targets

pytestmark = pytest.mark.unit


@pytest.fixture
def llama(tmp_path: Path, tiny_llama: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "tiny-llama"))


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    return targets.make_kimi(tmp_path / "tiny-kimi")


def test_identity_follows_the_content_not_the_place(llama: Path, tiny_llama: Path) -> None:
    identity = Target.open(llama).identity()
    assert identity == Target.open(tiny_llama).identity()
    assert (identity.name, identity.revision, identity.num_layers) == ("tiny-llama", None, 8)
    assert identity.config_sha256 == sha256_file(llama / "config.json")

    data = bytearray((llama / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (llama / "model.safetensors").write_bytes(data)
    changed = Target.open(llama).identity()
    assert changed.weights_sha256 != identity.weights_sha256
    assert changed.config_sha256 == identity.config_sha256


def test_identity_covers_every_weight_file_and_lists_the_missing(kimi: Path) -> None:
    before = Target.open(kimi).identity()
    second = kimi / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1] + b"\x77")
    assert Target.open(kimi).identity().weights_sha256 != before.weights_sha256
    second.unlink()
    with pytest.raises(TargetError, match=r"1 of 2 weight files are missing: model-00002-of-00002\.safetensors"):
        Target.open(kimi).identity()


def test_a_snapshot_of_the_hub_cache_is_named_after_its_repository(tmp_path: Path, tiny_llama: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--moonshotai--Kimi-K2.5" / "snapshots" / commit
    shutil.copytree(tiny_llama, folder)
    identity = Target.open(folder).identity()
    assert (identity.name, identity.revision) == ("moonshotai/Kimi-K2.5", commit)


def test_weights_are_hashed_once(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []

    def counting(path: Path) -> str:
        hashed.append(path)
        return sha256_file(path)

    monkeypatch.setattr(digest_cache_module, "sha256_file", counting)
    first = Target.open(llama, cache_dir=tmp_path / "cache").identity()
    second = Target.open(llama, cache_dir=tmp_path / "cache").identity()
    assert first == second == Target.open(llama).identity()
    assert hashed == [llama / "model.safetensors"] * 2  # the first open, and the one without a cache
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [CACHE_NAME]


def test_a_change_in_place_with_the_old_times_is_noticed(llama: Path, tmp_path: Path) -> None:
    before = Target.open(llama, cache_dir=tmp_path / "cache").identity()
    file = llama / "model.safetensors"
    stat = file.stat()
    with file.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        handle.write(b"\x77")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert Target.open(llama, cache_dir=tmp_path / "cache").identity().weights_sha256 != before.weights_sha256


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"version": 9, "sha256": {}}', b'{"version": 1, "sha256": 3}', b"\xff"]
)
def test_a_broken_cache_is_ignored_and_replaced(llama: Path, tmp_path: Path, content: bytes) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / CACHE_NAME).write_bytes(content)
    assert Target.open(llama, cache_dir=cache).identity() == Target.open(llama).identity()
    assert json.loads((cache / CACHE_NAME).read_text())["version"] == 1


def test_a_cache_that_cannot_be_written_stops_nobody(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert Target.open(llama, cache_dir=tmp_path / "cache").identity() == Target.open(llama).identity()


def test_two_writers_keep_each_others_digests(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        file.write_text(file.name)
    one, other = DigestCache(tmp_path / "cache"), DigestCache(tmp_path / "cache")
    one.sha256(files[0])
    other.sha256(files[1])
    one.save()
    other.save()
    kept = json.loads((tmp_path / "cache" / CACHE_NAME).read_text())["sha256"]
    assert sorted(kept.values()) == sorted(sha256_file(file) for file in files)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("half")

    def growing(path: Path) -> str:
        digest = sha256_file(path)
        path.write_text("whole now")
        return digest

    monkeypatch.setattr(digest_cache_module, "sha256_file", growing)
    with pytest.raises(TargetError, match="changed while it was read"):
        DigestCache(None).sha256(file)


def test_tokenizer_identity_follows_vocabulary_and_template(llama: Path) -> None:
    before = Target.open(llama).tokenizer_identity()
    assert not before.remote_code
    template = llama / "chat_template.jinja"
    assert before.chat_template_sha256 == sha256_bytes(template.read_bytes())

    (llama / "README.md").write_text("no part of the tokenizer")
    (llama / "helper.py").write_text("# no part of a tokenizer without code")
    assert Target.open(llama).tokenizer_identity() == before

    template.write_text(template.read_text() + " ")
    changed = Target.open(llama).tokenizer_identity()
    assert changed.sha256 != before.sha256
    assert changed.chat_template_sha256 != before.chat_template_sha256

    vocabulary = llama / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text() + "\n")
    assert Target.open(llama).tokenizer_identity().sha256 != changed.sha256


@pytest.mark.parametrize("place", ["text", "list", "legacy", "none"])
def test_the_template_is_found_where_transformers_finds_it(llama: Path, place: str) -> None:
    (llama / "chat_template.jinja").unlink()
    file = llama / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    if place == "legacy":
        (llama / "chat_template.json").write_text(json.dumps({"chat_template": "HELLO"}))
    elif place == "text":
        settings["chat_template"] = "HELLO"
    elif place == "list":
        settings["chat_template"] = [{"name": "tool_use", "template": "X"}, {"name": "default", "template": "HELLO"}]
    file.write_text(json.dumps(settings))
    expected = None if place == "none" else sha256_bytes(b"HELLO")
    assert Target.open(llama).tokenizer_identity().chat_template_sha256 == expected


def test_a_folder_without_a_tokenizer_is_refused(llama: Path) -> None:
    (llama / "tokenizer.json").unlink()
    for use in (Target.open(llama).tokenizer, Target.open(llama).tokenizer_identity):
        with pytest.raises(TargetError, match=r"has no tokenizer: expected tokenizer\.json"):
            use()


def test_a_broken_tokenizer_is_refused(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{")
    with pytest.raises(TargetError, match="cannot be opened"):
        Target.open(llama).tokenizer()


def test_a_plain_tokenizer_opens_even_where_code_is_allowed(llama: Path) -> None:
    for trust in (False, True):
        tokenizer = Target.open(llama, trust_remote_code=trust).tokenizer()
        assert tokenizer.decode(tokenizer("Hello world!").input_ids) == "Hello world!"


def test_a_tokenizers_code_runs_only_with_consent(kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    proof = tmp_path / "it-ran"
    code = kimi / "tokenization_kimi.py"
    code.write_text(f"{code.read_text()}\nopen({str(proof)!r}, 'w').close()\n")

    with pytest.raises(TargetError, match=r"its own code: tokenization_kimi\.py \(class TikTokenTokenizer\).*allow it"):
        Target.open(kimi).tokenizer()
    assert not proof.exists()

    tokenizer = Target.open(kimi, trust_remote_code=True).tokenizer()
    assert tokenizer.says == "the code in the folder ran"
    assert proof.exists()
    assert tokenizer.decode(tokenizer("Hello world!").input_ids) == "Hello world!"


def test_a_tokenizers_code_is_recorded_and_covered(kimi: Path) -> None:
    before = Target.open(kimi).tokenizer_identity()
    assert before.remote_code
    (kimi / "tool_declaration.py").write_text("# imported by the tokenizer's code")
    assert Target.open(kimi).tokenizer_identity().sha256 != before.sha256


@pytest.mark.parametrize(
    ("auto_map", "message"),
    [
        ({"AutoTokenizer": ["someone/else--tokenization_x.Tok", None]}, "code of another repository"),
        ({"AutoTokenizer": ["tokenization_gone.Tok", None]}, r"there is no tokenization_gone\.py"),
        ({"AutoTokenizer": ["../../evil.Tok", None]}, "names the code"),
        ({"AutoTokenizer": 7}, "auto_map must name a class"),
        ({"AutoTokenizer": [None, None]}, "auto_map must name a class"),
    ],
)
def test_code_that_does_not_lie_in_the_folder_is_refused(kimi: Path, auto_map: object, message: str) -> None:
    file = kimi / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": auto_map}))
    with pytest.raises(TargetError, match=message):
        Target.open(kimi, trust_remote_code=True).tokenizer()
