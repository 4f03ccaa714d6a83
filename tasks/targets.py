"""Where stages find what their parameters name: the target's folder, prompt files, folders of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.dump.manifest import TargetIdentity, TokenizerIdentity
from infra.settings import Settings
from tasks.params import DEMO_TARGET, TargetParams

if TYPE_CHECKING:
    from eagle3.target import Target


def target_folder(params: TargetParams, settings: Settings, on_progress: Callable[[str], None] | None = None) -> Path:
    """The target's folder on this machine; the demo's model is made on first use."""
    if params.path == DEMO_TARGET:
        from infra.smollm2 import ensure_smollm2

        return ensure_smollm2(settings.root, on_progress)
    return Path(params.path).expanduser().resolve()


def open_target(params: TargetParams, settings: Settings, on_progress: Callable[[str], None] | None = None) -> "Target":
    from eagle3.target import Target

    return Target.open(
        target_folder(params, settings, on_progress),
        trust_remote_code=params.trust_remote_code,
        cache_dir=settings.root / "cache",
    )


def target_differences(target: "Target", identity: TargetIdentity, tokenizer: TokenizerIdentity) -> list[str]:
    """In which fields this target is not the one that a manifest or a contract names; empty where it is.

    A folder's name and a revision are labels: digests and shape decide.
    """
    expected = identity.model_dump(exclude={"name", "revision"})
    found = target.identity().model_dump(exclude={"name", "revision"})
    expected |= {f"tokenizer.{field}": value for field, value in tokenizer.model_dump().items()}
    found |= {f"tokenizer.{field}": value for field, value in target.tokenizer_identity().model_dump().items()}
    return [
        f"{field} is {_short(found[field])} here, {_short(value)} there"
        for field, value in expected.items()
        if found[field] != value
    ]


def _short(value: object) -> str:
    return str(value)[:16]


def fresh_folder(settings: Settings, kind: str, name: str) -> Path:
    """An empty working folder of this run under the home; the caller removes it when it is done."""
    import tempfile

    parent = settings.root / kind
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
