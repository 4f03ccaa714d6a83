"""The model registry: versions of a registered model, found by alias or number."""

import re
from collections.abc import Mapping
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import RestException

from infra.lineage import names, values
from infra.lineage.connection import Connection
from infra.lineage.errors import LineageError

_FROM_MODEL = (
    names.CAPTURE_POINTS,
    names.CAPTURE_FINAL,
    names.CHECKPOINT_URI,
    names.CONTRACT_SHA256,
    names.WEIGHTS_SHA256,
    names.REPORT,
    names.DUMP_URI,
    names.DUMP_SHA256,
    names.TARGET_NAME,
    names.TARGET_WEIGHTS,
)
_SOURCE = "models:/"
_MODEL_SOURCE = re.compile(r"models:/(m-[0-9a-f]{32})")
_LISTED = 20


def version_of(connection: Connection, name: str, model_id: str, tags: Mapping[str, Any], description: str) -> str:
    """The version of `name` whose source is this logged model, made where there is none; its tags are brought up."""
    client = connection.client
    model = client.get_logged_model(model_id)
    missing = [tag for tag in _FROM_MODEL if tag not in model.tags]
    if missing or model.status != "READY":
        raise LineageError(
            f"{model_id} cannot be registered: its status is {model.status} and it lacks "
            f"{', '.join(missing) or 'no tag'}; expected a finished drafter that record_training wrote"
        )
    all_tags = values.as_texts(tags) | {tag: model.tags[tag] for tag in _FROM_MODEL}
    values.refuse_secrets({"description": description})
    values.check_fits(all_tags, values.VERSION_TAG_LIMIT, "the tag of a version")
    values.check_fits({"description": description}, values.DESCRIPTION_LIMIT, "the text")
    source = f"{_SOURCE}{model_id}"
    _ensure_model(connection, name)
    registered = [v for v in client.search_model_versions(f"name = '{_quoted(name)}'") if v.source == source]
    if not registered:
        made = client.create_model_version(
            name,
            source,
            run_id=model.source_run_id,
            tags=all_tags,
            description=description,
            await_creation_for=0,  # the server's answer is the finished version
            model_id=model_id,
        )
        return str(made.version)
    version = min(registered, key=lambda v: int(v.version))
    for tag, value in all_tags.items():
        if version.tags.get(tag) != value:
            client.set_model_version_tag(name, version.version, tag, value)
    if version.description != description:
        client.update_model_version(name, version.version, description=description)
    return str(version.version)


def find_version(connection: Connection, name: str, alias_or_version: str) -> ModelVersion:
    """The version; where there is none, the error lists what there is."""
    client = connection.client
    try:
        if alias_or_version.isdigit():
            return client.get_model_version(name, alias_or_version)
        return client.get_model_version_by_alias(name, alias_or_version)
    except RestException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
    try:
        model = client.get_registered_model(name)
    except RestException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        known = [model.name for model in client.search_registered_models(max_results=_LISTED)]
        raise LineageError(
            f"there is no registered model {name!r} in MLflow at {connection.uri}; it has "
            f"{', '.join(known) if known else 'none: register one with the pipeline'}"
        ) from None
    aliases = ", ".join(f"@{alias} (version {version})" for alias, version in sorted(model.aliases.items()))
    versions = sorted(int(v.version) for v in client.search_model_versions(f"name = '{_quoted(name)}'"))
    kind = "version" if alias_or_version.isdigit() else "alias"
    raise LineageError(
        f"{name} has no {kind} {alias_or_version!r}; it has the aliases "
        f"{aliases or '(none)'} and the versions {', '.join(map(str, versions)) or '(none)'}"
    )


def logged_model_of(version: ModelVersion) -> str | None:
    """The logged model's id; it stands in the source, `model_id` is not filled."""
    found = _MODEL_SOURCE.fullmatch(version.source or "")
    return found.group(1) if found else None


def _ensure_model(connection: Connection, name: str) -> None:
    try:
        connection.client.create_registered_model(name)
    except RestException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _quoted(name: str) -> str:
    if "'" in name:
        raise LineageError(f"{name!r} is not a name for a registered model: it has a quote")
    return name
