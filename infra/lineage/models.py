"""MLflow's logged models: the target (its files lie elsewhere) and the drafter."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.models.utils import get_external_mlflow_model_spec

from eagle3.contract import CONTRACT_NAME, DrafterContract
from eagle3.digests import sha256_json
from eagle3.dump.manifest import TargetIdentity, TokenizerIdentity
from eagle3.refs import CheckpointRef, DumpRef
from infra.lineage import names, values
from infra.lineage.connection import Connection, plain_name
from infra.lineage.errors import LineageError
from infra.lineage.runs import RunWriter

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
TARGET_TYPE, DRAFTER_TYPE = "target", "drafter"


def target(connection: Connection, identity: TargetIdentity, tokenizer: TokenizerIdentity) -> str:
    """The id of the target's external model, made where there is none for these weights, config and tokenizer."""
    facts = {"target": identity.model_dump(mode="json"), "tokenizer": tokenizer.model_dump(mode="json")}
    key = sha256_json([identity.weights_sha256, identity.config_sha256, facts["tokenizer"]])
    experiment_id = connection.experiment(names.TARGETS)
    client = connection.client
    found = client.search_logged_models([experiment_id], f"tags.`{names.KEY}` = '{key}'", max_results=10)
    if ready := [model for model in found if model.status == "READY"]:
        return str(min(ready, key=lambda model: model.creation_timestamp).model_id)
    described = {f"{part}.{name}": value for part, fields in facts.items() for name, value in fields.items()}
    model = client.create_logged_model(
        experiment_id,
        name=plain_name(identity.name),
        tags={names.KEY: key, names.IS_EXTERNAL: "true", **values.as_texts(described)},
        params=values.as_texts(described),
        model_type=TARGET_TYPE,
    )
    with tempfile.TemporaryDirectory() as folder:  # MLflow wants this file in every model that it lists
        path = Path(folder) / MLMODEL_FILE_NAME
        get_external_mlflow_model_spec(model).save(str(path))
        client.log_model_artifact(model.model_id, str(path))
    client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)


@contextmanager
def new_drafter(run: RunWriter, *, plain: str, tags: Mapping[str, str], files: Sequence[Path]) -> Iterator[str]:
    """The run's drafter as a logged model with these files: READY at the end, FAILED where the block raises."""
    client = run.connection.client
    model = client.create_logged_model(
        run.experiment_id,
        name=plain_name(plain),
        source_run_id=run.run_id,
        tags=dict(tags),
        params=dict(tags),
        model_type=DRAFTER_TYPE,
    )
    try:
        for path in files:
            client.log_model_artifact(model.model_id, str(path))
        yield str(model.model_id)
        client.finalize_logged_model(model.model_id, "READY")
    except BaseException:
        with suppress(MlflowException):  # the first error is the one to tell
            client.finalize_logged_model(model.model_id, "FAILED")
        raise


def drafter_of(connection: Connection, contract_sha256: str) -> str:
    """The id of the newest drafter that carries this contract."""
    experiment_id = connection.find_experiment(names.TRAINING)
    wanted = f"tags.`{names.CONTRACT_SHA256}` = '{contract_sha256}'"
    found = connection.client.search_logged_models([experiment_id], wanted) if experiment_id else []
    ready = [model for model in found if model.status == "READY"]
    if not ready:
        raise LineageError(
            f"no drafter with contract {contract_sha256} is recorded in {names.TRAINING}: train it with the train "
            "flow, or benchmark the drafter of another reference"
        )
    return str(max(ready, key=lambda model: model.creation_timestamp).model_id)


def drafter_tags(contract: DrafterContract, checkpoint: CheckpointRef, dump: DumpRef) -> dict[str, str]:
    """What the drafter's model and its versions carry, so that a search finds them; the contract has the rest."""
    return values.as_texts(
        {
            names.CAPTURE_POINTS: list(contract.capture.aux),
            names.CAPTURE_FINAL: str(contract.capture.final),
            names.CHECKPOINT_URI: checkpoint.uri,
            names.CONTRACT_SHA256: checkpoint.sha256,
            names.WEIGHTS_SHA256: contract.weights_sha256,
            names.REPORT: contract.report_sha256,
            names.DUMP_URI: dump.uri,
            names.DUMP_SHA256: dump.sha256,
            names.TARGET_NAME: contract.target.name,
            names.TARGET_WEIGHTS: contract.target.weights_sha256,
        }
    )


def checkpoint_files(folder: Path, contract: DrafterContract, *, weights: bool) -> list[Path]:
    """The files that go to MLflow, once the folder is known to hold this contract."""
    files = [folder / name for name in (CONTRACT_NAME, CONFIG_NAME, *((WEIGHTS_NAME,) if weights else ()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise LineageError(f"expected a checkpoint in {folder}: it has no {', '.join(missing)}")
    found = DrafterContract.parse(files[0].read_bytes(), where=str(files[0])).digest()
    if found != contract.digest():
        raise LineageError(
            f"{files[0]} is another contract (digest {found}) than the one to record ({contract.digest()}): "
            "give the folder of this checkpoint"
        )
    return files


def output_of(connection: Connection, run_id: str) -> str:
    """The id of the drafter that a recorded training put out."""
    outputs = connection.client.get_run(run_id).outputs
    if outputs is None or not outputs.model_outputs:
        raise LineageError(f"the training run {run_id} has no drafter: its link to the logged model is missing")
    return str(outputs.model_outputs[0].model_id)
