"""Dumps of a store as lines for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagle3.dump.manifest import Manifest
from flows.console import plain
from tasks.estimate import size
from tasks.housekeeping import Pruned, StoredDump


def print_dumps(root: str, dumps: Sequence[StoredDump], unknown_users: str, console: Console) -> None:
    """The table of `dump ls`; `unknown_users` says why MLflow was not asked."""
    if not dumps:
        console.print(f"no dump lies below {root}", markup=False, soft_wrap=True)
        return
    table = Table("dump", "when", "captured", "samples", "tokens", "size", "state", "used by")
    for dump in dumps:
        table.add_row(
            escape(plain(dump.uri.removeprefix(root).lstrip("/") or dump.uri)),
            f"{dump.when:%Y-%m-%d %H:%M}",
            ", ".join(dump.points) or "-",
            _count(dump.num_samples),
            _count(dump.num_tokens),
            size(dump.bytes),
            _state(dump),
            escape(plain(", ".join(dump.used_by))) or ("?" if unknown_users else "-"),
        )
    console.print(f"{root}: {len(dumps)} prefixes, {size(sum(d.bytes for d in dumps))}", markup=False, soft_wrap=True)
    console.print(table)
    for dump in dumps:
        if dump.problem:
            console.print(plain(f"{dump.uri}: {dump.problem}"), markup=False, soft_wrap=True)
        if dump.num_foreign:
            console.print(plain(f"{dump.uri}: {dump.num_foreign} foreign files"), markup=False, soft_wrap=True)
    if unknown_users:
        console.print(f"who uses them is not known: {unknown_users}", markup=False, soft_wrap=True)


def print_manifest(uri: str, manifest: Manifest, users: Sequence[str], unknown_users: str, console: Console) -> None:
    """A manifest in words."""
    target, engine, tokenizer = manifest.target, manifest.engine, manifest.tokenizer
    generation = manifest.generation.model_dump(mode="json", exclude_none=True)
    shards = sum(shard.bytes for shard in manifest.shards)
    code = ", with code of its own" if tokenizer.remote_code else ""
    made = f"at commit {manifest.git_commit}" if manifest.git_commit else "outside a checkout"
    lines = {
        "dump": uri,
        "manifest": f"{manifest.digest()}, schema version {manifest.schema_version}",
        "made": f"{manifest.created_at:%Y-%m-%d %H:%M} UTC, {made}",
        "captured": f"{', '.join(manifest.spec.points)} as {manifest.dtype}",
        "holds": f"{manifest.num_samples:,} samples, {manifest.num_tokens:,} rows in {len(manifest.shards)} shards, "
        f"{size(shards)}; {'a' if manifest.probe else 'no'} probe of the live model",
        "target": f"{target.name}: {target.model_class}, {target.num_layers} layers, hidden {target.hidden_size}, "
        f"vocabulary {target.vocab_size}",
        "weights": target.weights_sha256,
        "tokenizer": f"{tokenizer.sha256}{code}",
        "prompts": manifest.prompts_sha256,
        "answers": ", ".join(f"{name} {value}" for name, value in generation.items()),
        "engine": f"{engine.name} {engine.version}, ids {engine.ids}",
        "live model": f"{engine.live.model_class} captured {list(engine.live.layers_to_capture)}",
        "packages": ", ".join(f"{name} {version}" for name, version in sorted(manifest.packages.items())),
        "used by": f"not known: {unknown_users}" if unknown_users else ", ".join(users) or "no registered drafter",
    }
    for heading, line in lines.items():
        console.print(plain(f"{heading:<12}{line}"), markup=False, soft_wrap=True)


def print_pruned(pruned: Pruned, console: Console) -> None:
    """What went, or would go, and what stays although it was named."""
    verb = "removed" if pruned.done else "would remove"
    for dump in pruned.removed:
        line = f"{verb} {dump.uri} ({dump.state}, {dump.when:%Y-%m-%d %H:%M}, {size(dump.bytes)})"
        foreign = f"; its {dump.num_foreign} foreign files stay" if dump.num_foreign else ""
        used = f"; used by {', '.join(dump.used_by)}" if dump.used_by else ""
        console.print(plain(line + used + foreign), markup=False, soft_wrap=True)
    for dump in pruned.kept:
        why = f"used by {', '.join(dump.used_by)}" if dump.used_by else "it changed meanwhile"
        console.print(plain(f"kept {dump.uri}: {why}"), markup=False, soft_wrap=True)
    console.print(f"{verb} {len(pruned.removed)} of them, {size(pruned.bytes)}", markup=False)
    if not pruned.done and pruned.removed:
        console.print("nothing was removed: `--yes` removes them", markup=False)


def _state(dump: StoredDump) -> str:
    return dump.state if dump.state == "committed" else f"[red]{dump.state}[/red]"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
