"""One MLflow run being written, and the search for one that was written before."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset as DatasetEntity
from mlflow.entities import DatasetInput, InputTag, LoggedModelInput, LoggedModelOutput, Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import MAX_INPUT_TAG_VALUE_SIZE

from eagle3.refs import DumpRef
from infra.lineage import names, values
from infra.lineage.connection import Connection
from infra.lineage.dataset import DIGEST_CHARACTERS, names_dump
from infra.lineage.errors import LineageError

_METRICS_PER_REQUEST = 500  # MLflow takes 1000, and 1 MB a request; a metric names its dataset and model


@dataclass(frozen=True)
class RunWriter:
    """Writes into one run through the client alone: no active run, no current experiment."""

    connection: Connection
    experiment_id: str
    run_id: str

    def params(self, params: Mapping[str, Any]) -> None:
        """Parameters as text; what is longer than MLflow keeps goes to the artifact `long_values.json`."""
        short, long = values.split_long(values.as_texts(params), values.PARAM_LIMIT)
        self.connection.client.log_batch(self.run_id, params=[Param(k, v) for k, v in short.items()])
        if long:
            self.text(names.LONG_VALUES, json.dumps(long, ensure_ascii=False, indent=1))

    def metrics(
        self,
        rows: Iterable[tuple[int, Mapping[str, Any]]],
        *,
        dataset: DatasetEntity | None = None,
        model_id: str | None = None,
    ) -> None:
        """Numbers by step, in batches; `dataset` and `model_id` say on what and of which model they were measured."""
        now = int(time.time() * 1000)
        of = {
            "dataset_name": dataset.name if dataset else None,
            "dataset_digest": dataset.digest if dataset else None,
            "model_id": model_id,
        }
        all_metrics = [
            Metric(name, value, now, step, run_id=self.run_id, **of)
            for step, row in rows
            for name, value in values.as_metrics(row).items()
        ]
        for start in range(0, len(all_metrics), _METRICS_PER_REQUEST):
            batch = all_metrics[start : start + _METRICS_PER_REQUEST]
            self.connection.client.log_batch(self.run_id, metrics=batch)

    def inputs(
        self, *, dataset: DatasetEntity | None = None, context: str = "", sha256: str = "", model_id: str | None = None
    ) -> None:
        """A dataset with its context and whole digest, a model, or both."""
        tags = {names.CONTEXT: context, "sha256": sha256}
        values.check_fits(tags, MAX_INPUT_TAG_VALUE_SIZE, "the tag of a dataset")
        datasets = [DatasetInput(dataset, [InputTag(k, v) for k, v in tags.items()])] if dataset else []
        models = [LoggedModelInput(model_id)] if model_id else []
        self.connection.client.log_inputs(self.run_id, datasets=datasets, models=models)

    def output(self, model_id: str, step: int) -> None:
        self.connection.client.log_outputs(self.run_id, [LoggedModelOutput(model_id, step)])

    def text(self, name: str, text: str) -> None:
        self.connection.client.log_text(self.run_id, text, name)

    def files(self, paths: Sequence[Path], folder: str | None = None) -> None:
        for path in paths:
            if not path.is_file():
                raise LineageError(f"expected a file to keep beside the run, found none at {path}")
            self.connection.client.log_artifact(self.run_id, str(path), folder)


@contextmanager
def new_run(
    connection: Connection,
    experiment: str,
    name: str,
    *,
    key: str,
    tags: Mapping[str, Any],
    prefect_url: str | None,
    note: str,
) -> Iterator[RunWriter]:
    """A run that ends as FINISHED, or as FAILED where the block raises. Only finished runs count as recorded."""
    more = {names.PREFECT_URL: prefect_url, names.NOTE: f"{note}\n\nPrefect run: {prefect_url}"} if prefect_url else {}
    texts = values.as_texts({**tags, names.NOTE: note, **more, names.KEY: key})
    short, long = values.split_long(texts, values.TAG_LIMIT)
    experiment_id = connection.experiment(experiment)
    run_id = connection.client.create_run(experiment_id, tags=short, run_name=name).info.run_id
    writer = RunWriter(connection, experiment_id, run_id)
    try:
        if long:
            writer.text(f"tags_{names.LONG_VALUES}", json.dumps(long, ensure_ascii=False, indent=1))
        yield writer
        connection.client.set_terminated(run_id, "FINISHED")
    except BaseException:
        with suppress(MlflowException):  # the first error is the one to tell
            connection.client.set_terminated(run_id, "FAILED")
        raise


def runs_with_dump(connection: Connection, experiment: str, dump: DumpRef, context: str) -> list[Run]:
    """Finished runs with this very dump (URI and whole digest) in this context, the first one first."""
    digest = dump.sha256[:DIGEST_CHARACTERS]
    found = search(connection, experiment, f"dataset.digest = '{digest}' and dataset.context = '{context}'")
    return [run for run in found if any(names_dump(dataset, dump) for dataset in datasets(run, context))]


def datasets(run: Run, context: str) -> list[DatasetEntity]:
    """The datasets of a run in this context."""
    entries = run.inputs.dataset_inputs if run.inputs else []
    wanted = (names.CONTEXT, context)
    return [entry.dataset for entry in entries if any((tag.key, tag.value) == wanted for tag in entry.tags)]


def search(connection: Connection, experiment: str, condition: str) -> list[Run]:
    """Finished runs, the first one first. Their model inputs are empty: only `get_run` fills them."""
    experiment_id = connection.find_experiment(experiment)
    if experiment_id is None:
        return []
    condition = f"{condition} and attributes.status = 'FINISHED'"
    return list(connection.client.search_runs([experiment_id], condition, order_by=["attributes.start_time ASC"]))


def find_recorded(connection: Connection, experiment: str, key: str) -> str | None:
    """The id of the first finished run that was recorded under this key."""
    found = search(connection, experiment, f"tags.`{names.KEY}` = '{key}'")
    return str(found[0].info.run_id) if found else None
