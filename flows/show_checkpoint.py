"""A drafter's description for a person's eyes."""

from typing import TYPE_CHECKING

from flows.console import plain

if TYPE_CHECKING:
    from rich.console import Console

    from eagle3.drafter.description import DrafterDescription


def print_description(found: "DrafterDescription", console: "Console") -> None:
    """Line by line: what it is, what it reads, what it proposes, what speaks for it."""
    share = found.draft_vocab_size / found.target_vocab_size
    covers = f", {found.coverage:.1%} of the training tokens" if found.coverage is not None else ""
    flags = ", ".join(name for name, value in found.norm.model_dump().items() if value) or "none"
    lines = {
        "drafter": f"{found.architecture}, {found.parameters / 1e6:.2f} M parameters in {found.dtype} "
        f"({found.bytes / 1e6:.1f} MB)" + (", with an embedding of its own" if found.embedding else ""),
        "reads": f"{', '.join(found.points) or 'layers that nobody named'} ({found.num_slots} slots)",
        "shape": ", ".join(f"{name} {value}" for name, value in found.shape.items() if not isinstance(value, dict)),
        "norms": f"flags set: {flags}",
        "proposes": f"{found.draft_vocab_size} of {found.target_vocab_size} tokens ({share:.1%}){covers}; the map "
        "holds its invariants",
        "digest": found.weights_sha256,
    }
    if found.contract_sha256 is not None:
        lines["contract"] = f"{found.contract_sha256}: target {found.target}, dump {found.dump}"
    else:
        lines["contract"] = "none: nothing proves what it was trained on"
    for name, line in lines.items():
        console.print(plain(f"{name:<9} {line}"), markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(plain(f"careful: {note}"), markup=False, soft_wrap=True)
