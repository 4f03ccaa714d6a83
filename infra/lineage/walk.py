"""Walk the graph from a registered version back to the target.

What a tag or a dataset says is used to find the next node only. Facts are read from the manifest and the contract that
lie beside the runs, and only where their digests are the ones that were named.
"""

from datetime import UTC, datetime
from typing import Any, NoReturn

from mlflow.entities import LoggedModel, Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import RestException

from eagle3.contract import CONTRACT_NAME, DrafterContract
from eagle3.dump.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from eagle3.refs import DumpRef
from infra.lineage import names
from infra.lineage.connection import Connection
from infra.lineage.dataset import dump_facts
from infra.lineage.errors import LineageError
from infra.lineage.registry import find_version, logged_model_of
from infra.lineage.runs import datasets, runs_with_dump, search
from infra.lineage.tree import (
    BenchmarkNode,
    DrafterNode,
    DumpNode,
    LineageTree,
    RunNode,
    TargetNode,
    ValidationNode,
    VersionNode,
)

_MAX_CONTRACT_BYTES = 2**20


def walk(connection: Connection, name: str, alias_or_version: str) -> LineageTree:
    """The checked tree. Raises LineageError: unknown name, a missing link, or two links that contradict each other."""
    return _Walk(connection, name).tree(find_version(connection, name, alias_or_version))


class _Walk:
    """One walk; it remembers what it walks from, so that every error says so."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection = connection
        self.client = connection.client
        self.urls = connection.urls
        self.start = name

    def tree(self, version: ModelVersion) -> LineageTree:
        self.start = f"{version.name} version {version.version}"
        model = self._logged_model(version)
        contract = self._contract(version, model)
        training = self._run(model.source_run_id, "from the drafter to its training run")
        dump = self._training_dump(training, model)
        extraction, manifest = self._extraction(dump)
        target = self._target(extraction, manifest)
        self._agree("contract's target weights", contract.target.weights_sha256, manifest.target.weights_sha256)
        self._captured(contract, manifest)
        self._agree("contract's dump digest", contract.dump_sha256, dump.sha256)
        self._agree(f"version's tag {names.DUMP_SHA256}", version.tags.get(names.DUMP_SHA256), dump.sha256)
        return LineageTree(
            version=VersionNode(
                url=self.urls.version(version.name, version.version),
                name=version.name,
                version=str(version.version),
                aliases=tuple(version.aliases),
                description=version.description or "",
                tags=dict(version.tags),
            ),
            drafter=DrafterNode(
                url=self.urls.logged_model(model.experiment_id, model.model_id),
                model_id=model.model_id,
                name=model.name,
                checkpoint_uri=model.tags[names.CHECKPOINT_URI],
                contract_sha256=contract.digest(),
                contract=contract,
            ),
            training=RunNode(**self._facts(training)),
            dump=DumpNode(
                url=self.urls.artifact(extraction.info.experiment_id, extraction.info.run_id, MANIFEST_NAME),
                uri=dump.uri,
                sha256=dump.sha256,
                capture=manifest.spec,
                engine_ids=manifest.engine.ids,
                live=manifest.engine.live,
                num_samples=manifest.num_samples,
                num_tokens=manifest.num_tokens,
            ),
            extraction=RunNode(**self._facts(extraction)),
            target=target,
            validations=self._validations(dump, contract),
            benchmarks=self._benchmarks(model.model_id),
        )

    def _logged_model(self, version: ModelVersion) -> LoggedModel:
        link = "from the version to its logged model"
        model_id = logged_model_of(version)
        if model_id is None:
            self._missing(
                link, f"its source is {version.source!r}; expected one that record_training and register wrote"
            )
        model = self._get(self.client.get_logged_model, model_id, link)
        for tag in (names.CHECKPOINT_URI, names.CONTRACT_SHA256):
            if tag not in model.tags:
                self._missing(f"from the drafter {model_id} to its checkpoint", f"the tag {tag} is not there")
        return model

    def _contract(self, version: ModelVersion, model: LoggedModel) -> DrafterContract:
        data = self.connection.read_artifact(model.artifact_location, CONTRACT_NAME, max_bytes=_MAX_CONTRACT_BYTES)
        if data is None:
            self._missing(f"from the drafter {model.model_id} to its contract", f"it has no artifact {CONTRACT_NAME}")
        contract = DrafterContract.parse(data, where=f"{CONTRACT_NAME} of {model.model_id}")
        self._agree(f"drafter's tag {names.CONTRACT_SHA256}", model.tags[names.CONTRACT_SHA256], contract.digest())
        self._agree(
            f"version's tag {names.CONTRACT_SHA256}", version.tags.get(names.CONTRACT_SHA256), contract.digest()
        )
        self._agree(
            f"version's tag {names.WEIGHTS_SHA256}", version.tags.get(names.WEIGHTS_SHA256), contract.weights_sha256
        )
        return contract

    def _training_dump(self, training: Run, model: LoggedModel) -> DumpRef:
        run_id = training.info.run_id
        outputs = [output.model_id for output in training.outputs.model_outputs] if training.outputs else []
        if model.model_id not in outputs:
            self._missing(
                "from the training run to the drafter", f"run {run_id} does not have {model.model_id} as output"
            )
        dumps = [facts for dataset in datasets(training, names.TRAINED_ON) if (facts := dump_facts(dataset))]
        if len(dumps) != 1:
            self._missing(
                "from the training run to its dump", f"run {run_id} has {len(dumps)} dumps as input, expected 1"
            )
        return DumpRef(uri=dumps[0].uri, sha256=dumps[0].manifest_sha256)

    def _extraction(self, dump: DumpRef) -> tuple[Run, Manifest]:
        link = f"from the dump {dump.uri} to its extraction run"
        runs = runs_with_dump(self.connection, names.EXTRACTION, dump, names.OUTPUT)
        if not runs:
            self._missing(link, f"no finished run of {names.EXTRACTION} has it as output")
        run = self._run(runs[0].info.run_id, link)
        data = self.connection.read_artifact(run.info.artifact_uri, MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
        if data is None:
            self._missing(f"from the extraction run {run.info.run_id} to the manifest", f"no artifact {MANIFEST_NAME}")
        manifest = Manifest.parse(data, where=f"{MANIFEST_NAME} of run {run.info.run_id}")
        self._agree("training run's dump digest", dump.sha256, manifest.digest())
        return run, manifest

    def _target(self, extraction: Run, manifest: Manifest) -> TargetNode:
        link = "from the extraction run to the target"
        inputs = extraction.inputs.model_inputs if extraction.inputs else []
        if not inputs:
            self._missing(link, f"run {extraction.info.run_id} has no model as input")
        model = self._get(self.client.get_logged_model, inputs[0].model_id, link)
        recorded = model.tags.get(names.TARGET_WEIGHTS)
        self._agree(f"target's tag {names.TARGET_WEIGHTS}", recorded, manifest.target.weights_sha256)
        return TargetNode(
            url=self.urls.logged_model(model.experiment_id, model.model_id),
            model_id=model.model_id,
            identity=manifest.target,
        )

    def _validations(self, dump: DumpRef, contract: DrafterContract) -> tuple[ValidationNode, ...]:
        nodes = tuple(
            ValidationNode(
                **self._facts(run),
                verdict=run.data.tags.get(names.VERDICT, "unknown"),
                report_sha256=run.data.tags.get(names.REPORT, ""),
            )
            for run in runs_with_dump(self.connection, names.VALIDATION, dump, names.CHECKED)
        )
        if contract.report_sha256 not in {node.report_sha256 for node in nodes}:
            self._missing(
                f"from the dump {dump.uri} to the validation that the contract rests on",
                f"no finished run of {names.VALIDATION} has the report {contract.report_sha256}",
            )
        return nodes

    def _benchmarks(self, model_id: str) -> tuple[BenchmarkNode, ...]:
        found = search(self.connection, names.BENCHMARK, f"tags.`{names.MODEL_ID}` = '{model_id}'")
        runs = [self.client.get_run(run.info.run_id) for run in found]  # a search leaves the model inputs empty
        return tuple(
            BenchmarkNode(
                **self._facts(run),
                prompts=run.data.tags.get(names.PROMPTS_NAME, "unknown"),
                prompts_sha256=run.data.tags.get(names.PROMPTS_SHA256, ""),
                settings={
                    name.removeprefix(names.SETTING): value
                    for name, value in run.data.params.items()
                    if name.startswith(names.SETTING)
                },
            )
            for run in runs
            if run.inputs and model_id in {model.model_id for model in run.inputs.model_inputs}
        )

    def _run(self, run_id: str | None, link: str) -> Run:
        if not run_id:
            self._missing(link, "no run is named")
        run = self._get(self.client.get_run, run_id, link)
        if run.info.lifecycle_stage != "active":
            self._missing(link, f"the run {run_id} is deleted")
        return run

    def _get(self, getter: Any, key: str, link: str) -> Any:
        try:
            return getter(key)
        except RestException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"):
                raise
            return self._missing(link, f"{key} does not exist")

    def _facts(self, run: Run) -> dict[str, Any]:
        info = run.info
        return {
            "url": self.urls.run(info.experiment_id, info.run_id),
            "run_id": info.run_id,
            "name": info.run_name,
            "started_at": datetime.fromtimestamp(info.start_time / 1000, UTC),
            "prefect_url": run.data.tags.get(names.PREFECT_URL),
            "metrics": dict(run.data.metrics),
        }

    def _captured(self, contract: DrafterContract, manifest: Manifest) -> None:
        if contract.capture != manifest.spec:
            raise LineageError(
                f"{self.start}: the links contradict each other: the contract names the slots "
                f"{', '.join(contract.capture.points)}, but the dump holds {', '.join(manifest.spec.points)}; their "
                "order counts too"
            )

    def _agree(self, what: str, claimed: str | None, found: str) -> None:
        if claimed != found:
            raise LineageError(
                f"{self.start}: the links contradict each other: the {what} is {claimed or '(missing)'}, what lies "
                f"there is {found}. A tag or an artifact was changed after the recording"
            )

    def _missing(self, link: str, why: str) -> NoReturn:
        raise LineageError(f"{self.start}: the link {link} is missing: {why}")
