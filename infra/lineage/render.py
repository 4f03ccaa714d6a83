"""The lineage for people."""

from rich.text import Text
from rich.tree import Tree

from infra.lineage.tree import LineageTree, RunNode

_SHORT = 12
_FIGURES = ("acceptance_length", "acceptance_rate")


def render(tree: LineageTree) -> Tree:
    """A rich tree from the version down to the target, every node with its page in MLflow and in Prefect.

    The addresses are links in a terminal. Where they are copied as text, print on a console of 200 columns: a narrower
    one breaks them over lines.
    """
    version, contract, dump = tree.version, tree.drafter.contract, tree.dump
    aliases = " ".join(f"@{alias}" for alias in version.aliases)
    root = Tree(_lines(f"{version.name} version {version.version} {aliases}".rstrip(), version.url))
    drafter = root.add(
        _lines(
            f"drafter {tree.drafter.name}",
            f"checkpoint {tree.drafter.checkpoint_uri}",
            f"contract {tree.drafter.contract_sha256[:_SHORT]}, weights {contract.weights_sha256[:_SHORT]}",
            f"fc reads {', '.join(contract.capture.aux)}; final {contract.capture.final}",
            tree.drafter.url,
        )
    )
    for benchmark in tree.benchmarks:
        figures = [f"{name} {value:.3f}" for name, value in benchmark.metrics.items() if name in _FIGURES]
        settings = ", ".join(f"{name}={value}" for name, value in benchmark.settings.items())
        drafter.add(_run(benchmark, f"benchmark on {benchmark.prompts}", *figures, settings))
    training = drafter.add(_run(tree.training, "training"))
    node = training.add(
        _lines(
            f"dump {dump.uri}",
            f"manifest {dump.sha256[:_SHORT]}, {dump.num_samples} samples, {dump.num_tokens} tokens",
            f"points {', '.join(dump.capture.points)}",
            f"sent as {dump.engine_ids}",
            f"live model {dump.live.model_class}: layers_to_capture {list(dump.live.layers_to_capture)}",
            dump.url,
        )
    )
    for validation in tree.validations:
        node.add(_run(validation, f"validation: {validation.verdict}", f"report {validation.report_sha256[:_SHORT]}"))
    extraction = node.add(_run(tree.extraction, "extraction"))
    target = tree.target.identity
    extraction.add(
        _lines(
            f"target {target.name}" + (f" ({target.revision})" if target.revision else ""),
            f"{target.model_class}, {target.num_layers} layers, hidden {target.hidden_size}",
            f"weights {target.weights_sha256[:_SHORT]}, config {target.config_sha256[:_SHORT]}",
            tree.target.url,
        )
    )
    return root


def _run(run: RunNode, title: str, *facts: str) -> Text:
    prefect = [f"Prefect: {run.prefect_url}"] if run.prefect_url else []
    return _lines(f"{title} ({run.started_at:%Y-%m-%d %H:%M} UTC)", *facts, run.url, *prefect)


def _lines(title: str, *more: str) -> Text:
    """Plain text, never markup: names come from the server. The title stands out, addresses are links."""
    text = Text(title, style="bold").append("".join(f"\n{line}" for line in more if line), style="not bold")
    text.highlight_regex(r"https?://\S+", lambda url: f"link {url}")
    return text
