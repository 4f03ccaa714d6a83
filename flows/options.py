"""The pipeline's parameters as the command line gives them: a YAML file, options over it, the user's own paths."""

from pathlib import Path
from typing import Any

from tasks.params import DEMO_TARGET, ParamsError, PipelineParams

_PROJECT = Path(__file__).resolve().parents[1]


def pipeline_params(
    config: Path | None = None,
    *,
    prompts: Path | None = None,
    num_train: int | None = None,
    also: list[Path] | None = None,
    name: str | None = None,
) -> PipelineParams:
    """Parameters from a file (default: the demo's) and options.

    Raises ParamsError where the file or an option does not fit, or a prompts file that was named is not there.
    """
    params = PipelineParams.load(config) if config else PipelineParams()
    for path in (*([prompts] if prompts else ()), *(also or ())):
        if not path.is_file():
            raise ParamsError(f"there is no prompts file {path}: expected JSON lines, one prompt a line")
    values = params.model_dump(mode="json")
    if name:
        values["name"] = name
    if prompts:
        values["prompts"]["file"] = str(prompts.resolve())
    if num_train is not None:
        values["prompts"]["num_train"] = num_train
    if also:
        values["also"] = [str(path.resolve()) for path in also]
    _make_absolute(values)
    return PipelineParams.parse(values, where="the options")


def _make_absolute(values: dict[str, Any]) -> None:
    """The worker lives in another folder: what is there from here is named so that it is there from everywhere."""
    values["prompts"]["file"] = _seen_from_here(values["prompts"]["file"])
    values["also"] = [_seen_from_here(path) for path in values["also"]]
    if values["target"]["path"] != DEMO_TARGET:
        values["target"]["path"] = _seen_from_here(values["target"]["path"])


def _seen_from_here(named: str) -> str:
    """The absolute path of what is in the user's folder, else in the project; as it is where it is in neither."""
    path = Path(named).expanduser()
    for folder in (Path.cwd(), _PROJECT):
        if (folder / path).exists():
            return str((folder / path).resolve())
    return named
