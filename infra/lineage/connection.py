"""One MLflow server: reached in seconds or refused, its errors in our words, its pages' addresses."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException, RestException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from requests.exceptions import RequestException

from infra.lineage.errors import LineageError

_CONNECT_S, _ANSWER_S = 3.0, 5.0


@dataclass(frozen=True)
class UiUrls:
    """Addresses of MLflow's pages. Without the workflow type the UI may open its view for generative AI instead."""

    base: str

    def run(self, experiment_id: str, run_id: str) -> str:
        return self._page(f"experiments/{experiment_id}/runs/{run_id}")

    def artifact(self, experiment_id: str, run_id: str, path: str) -> str:
        return self._page(f"experiments/{experiment_id}/runs/{run_id}/artifacts/{quote(path)}")

    def logged_model(self, experiment_id: str, model_id: str) -> str:
        return self._page(f"experiments/{experiment_id}/models/{model_id}")

    def version(self, name: str, version: str) -> str:
        return self._page(f"models/{quote(name, safe='')}/versions/{version}")

    def experiment(self, experiment_id: str) -> str:
        return self._page(f"experiments/{experiment_id}")

    def _page(self, path: str) -> str:
        return f"{self.base}/#/{path}?workflowType=machine_learning"


class Connection:
    """A client of the server at `tracking_uri`; nothing global (active run, experiment, tracking URI) is touched.

    Raises LineageError where the URI is not http(s), carries credentials, or nothing that is MLflow answers there.
    """

    def __init__(self, tracking_uri: str) -> None:
        self.uri = _checked(tracking_uri)
        self.urls = UiUrls(self.uri)
        _knock(self.uri)
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        self._experiments: dict[str, str] = {}

    @contextmanager
    def errors_of(self, doing: str) -> Iterator[None]:
        """Turn MLflow's exceptions into LineageError; `doing` completes the sentence "could not ..."."""
        try:
            yield
        except RestException as error:  # the server answered: it refused
            raise LineageError(f"could not {doing}: MLflow at {self.uri} refused: {_first_line(error)}") from error
        except MlflowException as error:
            if "API request to" in str(error):
                raise LineageError(f"could not {doing}: {_unreachable(self.uri, _why(error))}") from error
            raise LineageError(f"could not {doing}: {_first_line(error)}") from error
        except RequestException as error:
            raise LineageError(f"could not {doing}: MLflow at {self.uri}: {_first_line(error)}") from error

    def find_experiment(self, name: str) -> str | None:
        """Its id, None where it does not exist. A deleted one is an error: MLflow takes no new runs into it."""
        if name not in self._experiments:
            experiment = self.client.get_experiment_by_name(name)
            if experiment is None:
                return None
            if experiment.lifecycle_stage != "active":
                raise LineageError(
                    f"the MLflow experiment {name} at {self.uri} is deleted: restore it with `mlflow experiments "
                    f"restore --experiment-id {experiment.experiment_id}`"
                )
            self._experiments[name] = experiment.experiment_id
        return self._experiments[name]

    def experiment(self, name: str) -> str:
        """Its id; made where it does not exist, also where two ask at once."""
        if (found := self.find_experiment(name)) is not None:
            return found
        try:
            self._experiments[name] = self.client.create_experiment(name)
        except RestException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return self.experiment(name)

    def read_artifact(self, root: str, name: str, *, max_bytes: int) -> bytes | None:
        """A file directly under an artifact root (a run's or a logged model's), None where there is none."""
        files = get_artifact_repository(root, tracking_uri=self.uri)
        listed = {file.path: file.file_size for file in files.list_artifacts()}
        if name not in listed:
            return None
        if (listed[name] or 0) > max_bytes:
            raise LineageError(f"{root}/{name} has {listed[name]} bytes; more than {max_bytes} are refused")
        with tempfile.TemporaryDirectory() as folder:
            return Path(files.download_artifacts(name, dst_path=folder)).read_bytes()


def plain_name(name: str) -> str:
    """A name for a logged model: MLflow refuses `/`, `:`, `.`, `%` and quotes there."""
    return re.sub(r"[^\w-]+", "-", name).strip("-") or "unnamed"


def _checked(uri: str) -> str:
    parts = urlsplit(uri)
    if parts.username or parts.password:
        raise LineageError(
            "the MLflow URL carries credentials: take them out and set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LineageError(f"expected the URL of an MLflow server, e.g. http://127.0.0.1:5000, got {uri!r}")
    return uri.rstrip("/")


def _knock(uri: str) -> None:
    """One short request, so that a server that is not there is an error of seconds."""
    try:
        answer = httpx.get(f"{uri}/health", timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LineageError(_unreachable(uri, str(error) or type(error).__name__)) from error
    if answer.status_code == httpx.codes.FORBIDDEN:
        raise LineageError(f"MLflow at {uri} refuses this host name (HTTP 403): add it to its --allowed-hosts")
    if answer.status_code != httpx.codes.OK or answer.text.strip() != "OK":
        raise LineageError(
            f"something answers at {uri}, but not as MLflow does (HTTP {answer.status_code} for /health): check "
            "EAGLE3_MLFLOW_TRACKING_URI, or start the local stack with `eagle3 up`"
        )


def _unreachable(uri: str, why: str) -> str:
    return (
        f"MLflow at {uri} does not answer as it should ({why}). Start the local stack with `eagle3 up`, or set "
        "EAGLE3_MLFLOW_TRACKING_URI to a server that runs"
    )


def _why(error: Exception) -> str:
    """The reason inside the long text of MLflow's client, e.g. `[Errno 111] Connection refused`."""
    found = re.search(r"\[Errno \d+\] [\w ]+|too many \d+ error responses|timed out", str(error))
    return found.group(0) if found else "no answer"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
