"""Parameters of the flows: the shipped configurations, the YAML loader, and the form that the UI makes of them."""

from pathlib import Path

import pytest

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
        ("nmae: x", r"nmae: Extra inputs are not permitted"),
        ("capture: {aux: [layers.x]}", "unknown capture point"),
        ("a: [", "is not YAML"),
        ("mismatch: {points: [layers.2, layers.15, layers.27]}", "which are the right layers"),
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
