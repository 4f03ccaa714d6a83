"""Which dumps do registered drafters rest on: every version of every registered model, by everything that names one."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlflow.entities import LoggedModel
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import RestException
from pydantic import BaseModel, ConfigDict

from eagle3.contract import CONTRACT_NAME, DrafterContract
from infra.lineage import names
from infra.lineage.connection import Connection
from infra.lineage.dataset import dump_facts
from infra.lineage.errors import LineageError
from infra.lineage.registry import logged_model_of
from infra.lineage.runs import datasets

_MAX_CONTRACT_BYTES = 2**20
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")


class DumpUse(BaseModel):
    """A registered version and one dump that it, its drafter, its contract or its training run names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: str
    aliases: tuple[str, ...]
    uri: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name} version {self.version}" + "".join(f" @{alias}" for alias in self.aliases)


def dump_uses(connection: Connection) -> tuple[DumpUse, ...]:
    """Every dump that a registered drafter's lineage names; where its links differ, each of the dumps.

    Nothing is believed to be the only truth: a dump counts as used where any link names it. Versions of other people's
    models are left out. Raises LineageError for a drafter of ours that names no dump at all.
    """
    aliases = {model.name: model.aliases for model in _pages(connection.client.search_registered_models)}
    found = []
    for version in _pages(connection.client.search_model_versions):
        refs, ours = _dumps_of(connection, version)
        if ours and not refs:
            raise LineageError(
                f"{version.name} version {version.version} is a drafter, but neither it nor its model nor its training "
                "run names the dump that it was trained on: they were changed or deleted"
            )
        named = tuple(sorted(a for a, v in aliases.get(version.name, {}).items() if str(v) == str(version.version)))
        found += [
            DumpUse(name=version.name, version=str(version.version), aliases=named, uri=uri, sha256=sha256)
            for uri, sha256 in sorted(refs)
        ]
    return tuple(found)


def _dumps_of(connection: Connection, version: ModelVersion) -> tuple[set[tuple[str, str]], bool]:
    """(URI, manifest digest) of the dumps that a version's links name, and whether it is a drafter of ours."""
    refs = _from_tags(version.tags)
    ours = names.CONTRACT_SHA256 in version.tags
    model_id = logged_model_of(version)
    model: LoggedModel | None = _or_none(connection.client.get_logged_model, model_id) if model_id else None
    if model is None:
        return refs, ours
    refs |= _from_tags(model.tags)
    ours = ours or names.CONTRACT_SHA256 in model.tags
    if not ours:
        return refs, False
    data = connection.read_artifact(model.artifact_location, CONTRACT_NAME, max_bytes=_MAX_CONTRACT_BYTES)
    if data is not None:
        contract = DrafterContract.parse(data, where=f"{CONTRACT_NAME} of {model_id}")
        refs.add((contract.dump_uri, contract.dump_sha256))
    run = _or_none(connection.client.get_run, model.source_run_id) if model.source_run_id else None
    if run is not None:
        facts = [dump_facts(dataset) for dataset in datasets(run, names.TRAINED_ON)]
        refs |= {(fact.uri, fact.manifest_sha256) for fact in facts if fact}
    return refs, True


def _from_tags(tags: Mapping[str, str]) -> set[tuple[str, str]]:
    uri, sha256 = tags.get(names.DUMP_URI, ""), tags.get(names.DUMP_SHA256, "")
    return {(uri, sha256)} if uri or sha256 else set()


def _or_none(getter: Any, key: str) -> Any:
    try:
        return getter(key)
    except RestException as error:
        if error.error_code not in _ABSENT:
            raise
        return None


def _pages(search: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(page_token=token)
        yield from page
        token = page.token
        if not token:
            return
