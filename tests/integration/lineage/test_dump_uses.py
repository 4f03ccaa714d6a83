"""Which dumps registered drafters rest on, asked of a real MLflow; and what `eagle3 dump` does with the answer."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from mlflow import MlflowClient

from eagle3.refs import DumpRef
from infra.lineage import Lineage, LineageError, TrainingRecord
from tests.command import dump
from tests.dumps import capture, write_dump
from tests.lineage_graph import Graph, digest, make_graph

pytestmark = pytest.mark.integration


def uses_of(lineage: Lineage, graph: Graph) -> set[tuple[str, str, str]]:
    return {(str(use), use.uri, use.sha256) for use in lineage.dump_uses() if use.name == graph.name}


def test_a_registered_drafter_names_its_dump_by_every_link(
    lineage: Lineage, client: MlflowClient, graph: Graph, training: TrainingRecord
) -> None:
    assert uses_of(lineage, graph) == set()
    version = graph.register(lineage, training)
    said = f"{graph.name} version {version} @champion"
    assert uses_of(lineage, graph) == {(said, graph.ref.uri, graph.ref.sha256)}
    # A tag that was changed adds a dump, it takes none away.
    client.set_model_version_tag(graph.name, version, "dump.uri", "s3://eagle3/dumps/another")
    client.set_logged_model_tags(training.model_id, {"dump.sha256": digest("forged")})
    assert (said, graph.ref.uri, graph.ref.sha256) in uses_of(lineage, graph)
    assert (said, "s3://eagle3/dumps/another", graph.ref.sha256) in uses_of(lineage, graph)


def test_other_peoples_models_are_left_out(lineage: Lineage, client: MlflowClient, graph: Graph) -> None:
    client.create_registered_model(graph.name)
    client.create_model_version(graph.name, "s3://somewhere/else", await_creation_for=0)
    assert uses_of(lineage, graph) == set()


def test_a_drafter_whose_links_are_gone_is_an_error(
    lineage: Lineage, client: MlflowClient, graph: Graph, training: TrainingRecord
) -> None:
    """The tags of the version are enough; without them, and with its model deleted, nothing is known."""
    version = graph.register(lineage, training)
    client.delete_logged_model(training.model_id)
    assert {use[1:] for use in uses_of(lineage, graph)} == {(graph.ref.uri, graph.ref.sha256)}
    for tag in ("dump.uri", "dump.sha256"):
        client.delete_model_version_tag(graph.name, version, tag)
    try:
        with pytest.raises(LineageError, match="is a drafter, but neither it nor its model"):
            lineage.dump_uses()
    finally:
        client.delete_model_version(graph.name, version)


@pytest.fixture
def root(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EAGLE3_STORE", (tmp_path / "store").as_uri())
    monkeypatch.setenv("EAGLE3_MLFLOW_TRACKING_URI", server)
    return tmp_path / "store" / "dumps"


def test_prune_never_touches_what_a_registered_drafter_rests_on(
    lineage: Lineage, graph: Graph, root: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    """One dump is named by its URI, one copy of it by its digest alone, the third by nobody."""
    captured = capture(tiny_llama, num_samples=4, max_new_tokens=16)
    for number in (1, 2):
        (root / "a" / str(number)).mkdir(parents=True)
        manifest = write_dump(
            captured, root / "a" / str(number), created_at=datetime.now(UTC) - timedelta(days=40 + number)
        )
    shutil.copytree(root / "a" / "2", root / "b" / "copy")
    ref = DumpRef(uri=(root / "a" / "2").as_uri(), sha256=manifest.digest())
    registered(lineage, graph, ref, tmp_path)
    listed = dump("ls", "--json").json
    assert listed["users_unknown"] is None
    users = {entry["uri"].rpartition("/dumps/")[2]: entry["used_by"] for entry in listed["dumps"]}
    used = [f"eagle3-{graph.seed} version 1"]
    assert users == {"a/1": [], "a/2": used, "b/copy": used}
    assert used[0] in dump("show", root / "a" / "2").out

    said = dump("prune", "--older-than", "1d", "--yes")
    assert said.code == 0
    assert f"kept {ref.uri}: used by {used[0]}" in said.out
    assert not (root / "a" / "1" / "manifest.json").exists()
    assert dump("verify", ref.uri).code == dump("verify", root / "b" / "copy").code == 0
    forced = dump("prune", "--older-than", "1d", "--yes", "--force")
    assert f"removed {ref.uri}" in forced.out
    assert not (root / "a" / "2" / "manifest.json").exists()


def registered(lineage: Lineage, graph: Graph, ref: DumpRef, folder: Path) -> None:
    """A version whose logged model and run name the dump of `ref`."""
    from eagle3.dump.manifest import Manifest

    path = Path(ref.uri.removeprefix("file://")) / "manifest.json"
    manifest = Manifest.parse(path.read_bytes(), where=str(path))
    made = make_graph(graph.seed, folder / "drafter")
    contract = made.contract.model_copy(
        update={
            "capture": manifest.spec,
            "target": manifest.target,
            "tokenizer": manifest.tokenizer,
            "dump_uri": ref.uri,
            "dump_sha256": ref.sha256,
        }
    )
    (made.folder / "contract.json").write_bytes(contract.canonical())
    mine = Graph(
        seed=made.seed,
        manifest=manifest,
        ref=ref,
        report=made.report,
        contract=contract,
        checkpoint=made.checkpoint.model_copy(update={"sha256": contract.digest()}),
        folder=made.folder,
        prompts=made.prompts,
    )
    mine.extraction(lineage)
    mine.register(lineage, mine.training(lineage), alias=None)
