"""Parameters of the flows: the shipped configurations, the YAML loader, and the form that the UI makes of them."""

from pathlib import Path

import pytest
from prefect.exceptions import ParameterTypeError

from tasks.params import ParamsError, PipelineParams

pytestmark = pytest.mark.unit

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_configuration_loads(path: Path) -> None:
    params = PipelineParams.load(path)
    assert params.extraction().capture == params.capture


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_training_on_a_gpu_is_not_budgeted_by_the_cpu(path: Path) -> None:
    """CPU-seconds of the process say nothing of work that a GPU does; the default is the demo's minute."""
    params = PipelineParams.load(path)
    assert params.serving.device != "cuda" or params.training.budget_unit == "steps"


def test_the_demo_is_the_default() -> None:
    demo = next(path for path in CONFIGS if path.name == "smollm2.yaml")
    assert PipelineParams.load(demo) == PipelineParams()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmae: x", r"nmae: there is no such parameter; did you mean name\?"),
        ("target: {x: 1}", r"target\.x: there is no such parameter \(here are path, trust_remote_code, shape\)"),
        ("mismatch: {points_: []}", r"mismatch\.points_: .* did you mean points\?"),
        ("- a", r"expected parameters by name \(name, target, .*\); got \['a'\]"),
        ("capture: {aux: [layers.x]}", "capture.aux: expected the names of capture points, .* got 'layers.x'"),
        ("a: [", "is not YAML"),
        ("mismatch: {points: [layers.2, layers.15, layers.27]}", "which are the right layers"),
        ("mismatch: {points: [embed, layers.2]}", r"mismatch.points has 2 points and capture.aux 3.*`mismatch: null`"),
        ("training: {budget: -1}", "training.budget"),
        ("serving: {attach: 'http://127.0.0.1:30000'}", "attach and attach_staging belong together"),
        ("serving: {attach: 'http://me:secret@host', attach_staging: x}", "serving.attach"),
    ],
)
def test_a_configuration_that_does_not_fit_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ParamsError, match=message):
        PipelineParams.load(path)


IDS_ALONE = (
    r"got 1, 2, 3\. An engine's ids say nothing without their convention: engine, version, model class\. "
    r"`eagle3 layers --ids 1,2,3 .*`"
)
TEXTS_OF_IDS = r"got '-1', '2'\. An engine's ids .* `eagle3 layers --ids -1,2 .*`"
BAD_CAPTURES = [
    (
        "capture: {aux: [1, 2, 3]}",
        rf"capture\.aux: expected the names of capture points, e\.g\. \[layers\.2.*{IDS_ALONE}",
    ),
    ("capture: {aux: ['-1', '2']}", TEXTS_OF_IDS),
    ("capture: {final: 30, aux: [embed]}", r"capture\.final: unknown capture point '30': .*--ids 30 "),
    ("capture: {aux: []}", r"capture\.aux: needs at least one point: expected the names .* got an empty list"),
    ("capture: {aux: }", r"capture\.aux: expected a list of the names .* got nothing"),
    ("capture: {aux: layers.2}", r"capture\.aux: expected a list of the names .* got 'layers\.2'"),
    (
        "capture: {aux: [layer2, layers.5, hidden]}",
        r"got 'layer2', 'hidden'\. A point is `embed`, `norm` or `layers\.i`",
    ),
    ("capture: {aux: [layers.2, layers.2]}", r"capture\.aux: captured twice: layers\.2"),
    ("capture: {aux: [layers.2, norm]}", r"capture: captured twice: norm is the final state"),
    ("mismatch: {points: [1, 2, 3]}", rf"mismatch\.points: expected the names .*{IDS_ALONE}"),
]


@pytest.mark.parametrize(("text", "message"), BAD_CAPTURES, ids=[text for text, _ in BAD_CAPTURES])
def test_a_capture_that_cannot_be_is_refused_with_what_came_and_what_the_target_has(
    tmp_path: Path, tiny_llama: Path, text: str, message: str
) -> None:
    path = tmp_path / "c.yaml"
    for target, has in (
        ("", r"\(smollm2\) has embed, layers\.0 \.\.\. layers\.29 and norm"),
        (f"target: {{path: {tiny_llama}}}\n", r"has embed, layers\.0 \.\.\. layers\.7 and norm"),
        ("target: {path: not/here}\n", r"A target of N layers has embed, layers\.0 \.\.\. layers\.\(N-1\) and norm"),
    ):
        path.write_text(target + text)
        with pytest.raises(ParamsError, match=rf"{message}.*{has}\.$") as refused:
            PipelineParams.load(path)
        assert "Value error" not in str(refused.value)
        assert len(str(refused.value).splitlines()) == 2


def test_the_shape_of_a_configuration_says_what_a_target_has_that_is_elsewhere() -> None:
    kimi = PipelineParams.load(next(path for path in CONFIGS if path.name == "kimi-k2.5.yaml"))
    values = kimi.model_dump(mode="json") | {"capture": {"aux": [2, 30, 58]}}
    with pytest.raises(ParamsError, match=r"got 2, 30, 58\. .*has embed, layers\.0 \.\.\. layers\.60 and norm"):
        PipelineParams.parse(values, where="kimi")


def test_a_flow_refuses_a_bad_capture_in_the_same_words() -> None:
    """What a run shows that came through the API, past the command."""
    from flows.extract import extract
    from flows.pipeline import pipeline

    for flow in (pipeline, extract):
        with pytest.raises(ParameterTypeError, match=rf"params\.capture\.aux: .*{IDS_ALONE}.*layers\.29 and norm"):
            flow.validate_parameters({"params": {"capture": {"aux": [1, 2, 3]}}})


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"none\.yaml"):
        PipelineParams.load(tmp_path / "none.yaml")


def _fields(schema: dict, definitions: dict) -> list[tuple[str, dict]]:  # type: ignore[type-arg]
    return [(f"{schema.get('title')}.{name}", field) for name, field in schema.get("properties", {}).items()]


def test_every_field_of_the_form_has_a_title_and_most_a_description() -> None:
    schema = PipelineParams.model_json_schema()
    fields = _fields(schema, {})
    for definition in schema["$defs"].values():
        fields += _fields(definition, {})
    untitled = [name for name, field in fields if "title" not in field and "$ref" not in field and "anyOf" not in field]
    assert not untitled


def test_a_pipeline_hands_every_setting_of_an_extraction_on() -> None:
    given = {"resume": "new", "shard_mib": 3, "staging_mib": 7, "partitions": 2, "name": "some"}
    extraction = PipelineParams.model_validate(given).extraction()
    assert {field: getattr(extraction, field) for field in given} == given
