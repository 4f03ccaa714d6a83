"""Values on their way into MLflow: whole, in its words, and never a secret. No server."""

import json
import math

import mlflow.data
import pytest
from mlflow.data.dataset_source_registry import get_dataset_source_from_json

from eagle3.refs import DumpRef
from infra.lineage import LineageError
from infra.lineage.connection import plain_name
from infra.lineage.dataset import DumpDataset, DumpSource
from infra.lineage.values import PARAM_LIMIT, as_metrics, as_texts, check_fits, refuse_secrets, split_long
from tests.lineage_graph import make_manifest

pytestmark = pytest.mark.unit


def test_values_become_text_without_loss() -> None:
    given = {"a": "text", "b": [1, 2], "c": True, "d": None, "check.f[0]": 0.1}
    assert as_texts(given) == {"a": "text", "b": "[1, 2]", "c": "true", "d": "null", "check.f_0_": "0.1"}


@pytest.mark.parametrize("length", [PARAM_LIMIT, PARAM_LIMIT + 1])
def test_only_a_value_beyond_the_limit_is_moved_and_the_pointer_fits(length: int) -> None:
    short, long = split_long({"p": "x" * length, "q": "y"}, PARAM_LIMIT)
    assert short["q"] == "y"
    assert len(short["p"]) <= PARAM_LIMIT
    assert long == ({"p": "x" * length} if length > PARAM_LIMIT else {})


def test_a_value_with_nowhere_to_go_is_refused() -> None:
    with pytest.raises(LineageError, match="the text 'description' has 11 characters, MLflow keeps 10"):
        check_fits({"description": "x" * 11}, 10, "the text")


@pytest.mark.parametrize(
    "values",
    [
        {"api_key": "sk-secret"},
        {"server": {"admin_api_key": "sk-secret"}},
        {"hf_token": "sk-secret"},
        {"SSL_KEYFILE_PASSWORD": "sk-secret"},
        {"hosts": ["http://ok", "https://user:sk-secret@host/path"]},
    ],
)
def test_a_secret_is_refused_by_name_without_its_value(values: dict[str, object]) -> None:
    with pytest.raises(LineageError) as error:
        refuse_secrets(values)
    assert next(iter(values)) in str(error.value)
    assert "sk-secret" not in str(error.value)


def test_flags_that_only_sound_like_secrets_pass() -> None:
    refuse_secrets(
        {
            "api_key": None,
            "admin_api_key": "",
            "tokenizer_path": "models/kimi",
            "max_total_tokens": 8192,
            "enable_token_auth": False,
            "url": "http://127.0.0.1:5000/x@y",
        }
    )


def test_sequences_become_metrics_by_index_and_none_is_no_measurement() -> None:
    got = as_metrics({"loss": 2, "top1": (0.5, None, 0.25), "odd [name]": 1.0, "missing": None, "nan": math.nan})
    assert math.isnan(got.pop("nan"))
    assert got == {"loss": 2.0, "top1/0": 0.5, "top1/2": 0.25, "odd _name_": 1.0}


def test_a_metric_that_is_no_number_is_refused() -> None:
    with pytest.raises(LineageError, match="'loss' must be a number, got str 'low'"):
        as_metrics({"loss": "low"})


@pytest.mark.parametrize(
    ("name", "plain"), [("moonshotai/Kimi-K2.5", "moonshotai-Kimi-K2-5"), ("a:b%c'd", "a-b-c-d"), ("//", "unnamed")]
)
def test_a_target_gets_a_name_that_mlflow_takes(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_a_dump_is_described_by_its_points_and_the_first_half_of_its_digest() -> None:
    manifest = make_manifest("unit")
    ref = DumpRef(uri="s3://eagle3/dumps/unit", sha256=manifest.digest())
    entity = DumpDataset(ref, manifest).entity()
    assert (entity.name, entity.digest, entity.source_type) == (ref.uri, ref.sha256[:32], "s3")
    rows = json.loads(entity.schema)["mlflow_colspec"]
    assert [(row["name"], row["type"]) for row in rows] == [(point, "bfloat16") for point in manifest.spec.points]
    source = json.loads(entity.source)
    assert source["engine_ids"]["ids"] == [3, 31, 59]
    assert source["engine_ids"]["model_class"] == "KimiK25ForConditionalGeneration"
    assert mlflow.data.get_source(entity).load() == ref


def test_a_dump_in_a_folder_is_a_local_dataset() -> None:
    ref = DumpRef(uri="file:///data/dumps/unit", sha256="0" * 64)
    entity = DumpDataset(ref).entity()
    assert (entity.source_type, entity.schema) == ("local", None)
    assert mlflow.data.get_source(entity).load() == ref


def test_other_s3_datasets_still_read_back_as_mlflow_reads_them() -> None:
    source = get_dataset_source_from_json(json.dumps({"uri": "s3://bucket/table.csv"}), "s3")
    assert not isinstance(source, DumpSource)
    assert source.uri == "s3://bucket/table.csv"


def test_a_manifest_of_another_dump_is_refused() -> None:
    with pytest.raises(LineageError, match="belongs to another dump"):
        DumpDataset(DumpRef(uri="s3://eagle3/dumps/unit", sha256="0" * 64), make_manifest("unit"))


def test_a_uri_longer_than_mlflow_keeps_is_refused() -> None:
    with pytest.raises(LineageError, match="MLflow keeps 500"):
        DumpDataset(DumpRef(uri="s3://" + "x" * 500, sha256="0" * 64))
