"""`eagle3 probe`: which tensors a running server really delivers. Exit codes: 0 proven, 1 refuted, 3 not checked."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.console import JUDGES, REFUTED, AsJson, checking, help_end, out, print_json
from infra.settings import Settings
from tasks.params import TargetParams

if TYPE_CHECKING:
    from tasks.probe import ProbeReport, SlotFinding

EPILOG = help_end(
    "eagle3 probe --server http://127.0.0.1:30000 --staging /data/tap --target models/kimi-k2.5",
    "eagle3 probe --server http://127.0.0.1:30000 --staging /data/tap --target smollm2 --compare s3://eagle3/dumps/smollm2-demo/20261129-170000-1a2b3c4d",
    exits=JUDGES,
)


def probe(
    server: Annotated[str, typer.Option(metavar="URL", help="A running SGLang server that has the tap.")],
    staging: Annotated[Path, typer.Option(metavar="DIR", help="Its EAGLE3_TAP_DIR, as this machine sees it.")],
    target: Annotated[str, typer.Option(metavar="DIR", help="Hugging Face folder of the target that it serves.")],
    to: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the probe is kept.")] = Path(
        "probe.safetensors"
    ),
    compare: Annotated[
        str | None, typer.Option(metavar="PROBE", help="Another probe's file, or a dump that has one.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python that the target's tokenizer brings.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send a few fixed texts to a running server, look at every layer, and say which of them its slots really are."""
    from infra.stack import connect
    from tasks.probe import probe_server

    with checking():
        report = probe_server(
            server,
            staging.expanduser().resolve(),
            TargetParams(path=target, trust_remote_code=trust_remote_code),
            to,
            connect(Settings.load()),
            compare=compare,
        )
    if as_json:
        print_json(report.model_dump(mode="json") | {"refuted": report.refuted})
    else:
        _print(report)
    if report.refuted:
        raise typer.Exit(REFUTED)


def _print(report: "ProbeReport") -> None:
    out.print(f"{report.engine} {report.model_class}, {report.dtype}; kept as {report.file}", markup=False)
    for slot in report.slots:
        out.print(f"  {_line(slot)}", markup=False, soft_wrap=True)
    out.print(f"{report.verdict}: {report.sentence}", markup=False, soft_wrap=True)
    if report.comparison is not None:
        compared = report.comparison
        out.print(f"against {compared.other} ({compared.rows} rows): {compared.sentence}", markup=False, soft_wrap=True)
        for boundary in compared.boundaries:
            if not boundary.fits:
                out.print(f"  {_line(boundary)}", markup=False, soft_wrap=True)


def _line(slot: "SlotFinding") -> str:
    fits = "is" if slot.fits else f"is not {slot.claimed}, but"
    name = f"{slot.claimed:<11} {fits} {slot.found}"
    return f"{name} (error {slot.error:.1e}; next {slot.runner_up} {slot.runner_up_error:.1e})"
