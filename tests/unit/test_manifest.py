"""The manifest: what it refuses to read, and what its digests stand for."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.digests import canonical_json, sha256_bytes
from eagle3.dump.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestError, spec_digest
from tests.dumps import capture, write_dump

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def manifest(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_dump(capture(tiny_llama), tmp_path_factory.mktemp("dump"))


def changed(manifest: Manifest, **fields: Any) -> bytes:
    return json.dumps(manifest.model_dump(mode="json") | fields).encode()


def test_a_manifest_reads_back_as_it_was_written(manifest: Manifest) -> None:
    again = Manifest.parse(manifest.canonical(), where="m")
    assert again == manifest
    assert again.digest() == manifest.digest() == sha256_bytes(manifest.canonical())


def test_the_digest_does_not_depend_on_the_order_of_keys_or_on_spaces(manifest: Manifest) -> None:
    fields = manifest.model_dump(mode="json")
    other = json.dumps(dict(reversed(fields.items())), indent=4).encode()
    assert Manifest.parse(other, where="m").digest() == manifest.digest()


def test_another_schema_version_is_named(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match="schema version 1; this software reads versions 2 and 3"):
        Manifest.parse(changed(manifest, schema_version=1), where="m")


def test_a_manifest_of_version_2_keeps_its_digest(manifest: Manifest) -> None:
    fields = manifest.model_dump(mode="json") | {"schema_version": 2}
    del fields["num_cut"], fields["generation"]["given"]
    for shard in fields["shards"]:
        del shard["answers"]
    before = canonical_json(fields)
    old = Manifest.parse(before, where="m")
    assert (old.canonical(), old.digest()) == (before, sha256_bytes(before))


@pytest.mark.parametrize(
    "newer", [{"num_cut": 1}, {"generation": {"source": "given", "max_new_tokens": None, "given": {}}}]
)
def test_a_manifest_of_version_2_with_newer_fields_is_refused(manifest: Manifest, newer: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="came with version 3; this says 2"):
        Manifest.parse(changed(manifest, schema_version=2, **newer), where="m")


@pytest.mark.parametrize(
    "generation",
    [
        {"source": "given", "max_new_tokens": None},
        {"source": "given", "max_new_tokens": 9, "given": {}},
        {"source": "while_answering", "max_new_tokens": None},
        {"source": "while_answering", "max_new_tokens": 9, "given": {}},
    ],
)
def test_answers_are_either_given_or_generated(manifest: Manifest, generation: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="source `given` has `given` and no `max_new_tokens`"):
        Manifest.parse(changed(manifest, generation=generation), where="m")


@pytest.mark.parametrize("name", ["../shard.safetensors", "/etc/passwd", "a/b", "..", ".hidden", "", "a\x00b", "a\n"])
def test_file_names_that_leave_the_dump_are_refused(manifest: Manifest, name: str) -> None:
    shards = [entry | {"name": name} for entry in manifest.model_dump(mode="json")["shards"]]
    with pytest.raises(ManifestError, match="not a plain file name inside the dump"):
        Manifest.parse(changed(manifest, shards=shards), where="m")
    samples = manifest.samples.model_dump() | {"name": name}
    with pytest.raises(ManifestError, match="not a plain file name inside the dump"):
        Manifest.parse(changed(manifest, samples=samples), where="m")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a valid manifest"),
        (b"{", "not a valid manifest"),
        (b"[]", "not a valid manifest"),
        (b" " * (MAX_MANIFEST_BYTES + 1), "refused"),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=f"^dumps/x: .*{message}"):
        Manifest.parse(data, where="dumps/x")


def test_an_unknown_field_and_a_missing_one_are_named(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match="surprise"):
        Manifest.parse(changed(manifest, surprise=1), where="m")
    fields = manifest.model_dump(mode="json")
    del fields["content_digest"]
    with pytest.raises(ManifestError, match="content_digest"):
        Manifest.parse(json.dumps(fields).encode(), where="m")


def test_the_spec_digest_moves_with_what_is_asked_and_not_with_the_engine(manifest: Manifest) -> None:
    def digest(**changes: Any) -> str:
        parts = {
            "spec": manifest.spec,
            "target": manifest.target,
            "tokenizer": manifest.tokenizer,
            "prompts_sha256": manifest.prompts_sha256,
            "generation": manifest.generation,
        }
        return spec_digest(**(parts | changes))

    assert digest() == manifest.spec_digest
    other_order = manifest.spec.model_copy(update={"aux": manifest.spec.aux[::-1]})
    longer = manifest.generation.model_copy(update={"max_new_tokens": 99})
    assert len({digest(), digest(spec=other_order), digest(generation=longer), digest(prompts_sha256="0" * 64)}) == 4
