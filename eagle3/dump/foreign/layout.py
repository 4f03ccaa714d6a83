"""What a layout of somebody else's dump is: how it is recognised, how it is read, what it claims of its slots."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.capture import CapturePoint
from eagle3.dump.foreign.sample import ForeignSample

LAST_LAYER = "layers.(N-1)"


@dataclass(frozen=True)
class Layout:
    """One way in which others lay states down. Labels without a claim are identified, and not judged."""

    name: str
    made_by: str
    looks_for: str
    """What a path of this layout has, for the error that lists what was looked for."""
    find: Callable[[Path], list[Path]]
    """One path a sample, in order; empty where the path is not of this layout."""
    read: Callable[[Path, Path], ForeignSample]
    """(one of those paths, the dump's own path) -> the sample."""
    claimed_by: str
    """Where the claims come from, or why there are none."""
    claimed: Mapping[str, str] = field(default_factory=dict)
    """What every reader of this layout assumes of a label: a capture point, or LAST_LAYER."""

    def claim(self, label: str, num_layers: int) -> CapturePoint | None:
        """What the layout claims of a slot of a target of that depth; None where it claims nothing."""
        claimed = self.claimed.get(label)
        if claimed is None:
            return None
        return CapturePoint.at_boundary(num_layers) if claimed == LAST_LAYER else CapturePoint(claimed)


def name_of(item: Path, root: Path) -> str:
    """A sample's id: its path below the dump, without suffixes."""
    name = str(item.relative_to(root)) if item != root and item.is_relative_to(root) else item.name
    for suffix in (".gz", ".ckpt", ".pt", ".safetensors"):
        name = name.removesuffix(suffix)
    return name
