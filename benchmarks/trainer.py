"""A training step beside speculators 0.9.0's own model and the floor, the same matrix products alone, in one run.

    python benchmarks/trainer.py [--steps 5] [--peer FOLDER] [--no-peer] [--json]

One thread, H 256, V 8192, V_draft 2048, unroll of 3: 1,008 and 4,032 rows in documents of 126, one document of 4,032.
A step is forward, backward and AdamW. Each figure comes from a process of its own, in CPU seconds (the median of
--steps), so that memory is that of the step; the peer's steps and ours take turns. Both start from the same weights on
the same data with the head trained (speculators freezes it), and the gradients of both are compared.

The peer gets an environment of its own under build/, made at the first run: speculators from the package index, torch
and transformers from ours, so that both compute with the same kernels.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HIDDEN, VOCAB, DRAFT_VOCAB, STEPS, DECAY, HEADS = 256, 8192, 2048, 3, 0.8, 4
PEER = ("speculators==0.9.0", "hs-connectors==0.9.0")  # without what they need; of that, its model imports these:
PEER_NEEDS = ("loguru>=0.7", "datasets>=4")
CASES = {"packed_1008": (1008, 126), "packed_4032": (4032, 126), "single_4032": (4032, 4032)}  # rows, of a document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each kind and case, in turns")
    parser.add_argument("--peer", type=Path, default=ROOT / "build" / "speculators", help="its environment")
    parser.add_argument("--no-peer", action="store_true", help="only ours and the floor")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=("ours", "ours_bf16", "peer", "floor", "floor_bf16"), help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--gradients", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return
    figures = measure(options)
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<44}{value}" for name, value in figures.items()))


def measure(options: argparse.Namespace) -> dict[str, float | str]:
    kinds = ["ours", "floor", "ours_bf16", "floor_bf16"]
    if not options.no_peer:
        kinds.insert(0, "peer")
    interpreter = None if options.no_peer else peer_interpreter(options.peer)
    figures: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as name:
        for case in options.cases:
            results: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
            for _ in range(options.rounds):
                for kind in kinds:
                    python = str(interpreter) if kind == "peer" else sys.executable
                    results[kind].append(run(python, kind, case, Path(name) / f"{kind}.pt", options.steps))
            figures |= summary(case, results)
            if interpreter is not None:
                difference = compare(Path(name) / "ours.pt", Path(name) / "peer.pt")
                figures[f"{case}_gradients_differ"] = float(f"{difference:.1e}")
    return figures


def summary(case: str, results: dict[str, list[dict[str, float]]]) -> dict[str, float | str]:
    """Rates and ratios of a case. Of several processes of a kind the quickest counts: others share the machine."""
    rows = CASES[case][0]
    seconds = {kind: min(r["cpu_seconds"] for r in of_kind) for kind, of_kind in results.items()}
    memory = {kind: max(r["mib_above_import"] for r in of_kind) for kind, of_kind in results.items()}
    found: dict[str, float | str] = {
        f"{case}_{kind}_rows_per_cpu_second": round(rows / seconds[kind])
        for kind in ("peer", "ours", "ours_bf16")
        if kind in seconds
    }
    found |= {
        f"{case}_{kind}_mib_above_import": round(memory[kind])
        for kind in ("peer", "ours", "ours_bf16")
        if kind in memory
    }
    if "peer" in seconds:
        found[f"{case}_times_the_peer"] = round(seconds["peer"] / seconds["ours"], 2)
        found[f"{case}_memory_of_the_peers"] = round(memory["ours"] / memory["peer"], 3)
    found[f"{case}_of_the_floor"] = round(seconds["ours"] / seconds["floor"], 3)
    found[f"{case}_bf16_of_its_floor"] = round(seconds["ours_bf16"] / seconds["floor_bf16"], 3)
    found[f"{case}_bf16_times_fp32"] = round(seconds["ours"] / seconds["ours_bf16"], 2)
    return found


def run(python: str, kind: str, case: str, gradients: Path, steps: int) -> dict[str, float]:
    command = [python, __file__, "--child", kind, "--case", case, "--gradients", str(gradients), "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = "" if kind == "peer" else str(ROOT)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind}, {case}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peer_interpreter(folder: Path) -> Path:
    """The peer's environment, made where it is not there yet."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for arguments in (["--no-deps", *PEER], PEER_NEEDS):
            done = subprocess.run([*install, *arguments], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"pip install {' '.join(arguments)}: {done.stderr[-2000:]}")
        (folder / "complete").touch()
    return python


def compare(ours: Path, peers: Path) -> float:
    """The largest relative difference of a gradient, over all tensors."""
    import torch

    one, other = (torch.load(path, weights_only=True) for path in (ours, peers))
    if one.keys() != other.keys():
        raise SystemExit(f"gradients of other tensors: {sorted(one.keys() ^ other.keys())}")
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


def child(options: argparse.Namespace) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    rows, document = CASES[options.case]
    bf16 = options.child.endswith("_bf16")
    if options.child.startswith("floor"):
        return {"cpu_seconds": floor(rows, torch.bfloat16 if bf16 else torch.float32), "mib_above_import": 0.0}
    make = peer if options.child == "peer" else ours
    step, imported = make(rows, document, bf16)
    gradients = step()
    torch.save(gradients, options.gradients)
    del gradients
    step()
    seconds = []
    for _ in range(options.steps):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return {"cpu_seconds": statistics.median(seconds), "mib_above_import": peak() - imported}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tensors(rows: int, document: int) -> dict[str, Any]:
    """Weights and data by one seed. Documents have `document` rows, so document + 1 tokens and states."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    wide, middle = 2 * HIDDEN, 3 * HIDDEN
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        **{f"self_attn.{name}_proj": (HIDDEN, wide) for name in "qkv"},
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        **{f"mlp.{name}_proj": (middle, HIDDEN) for name in ("gate", "up")},
        "mlp.down_proj": (HIDDEN, middle),
        "lm_head": (DRAFT_VOCAB, HIDDEN),
    }
    weights = {name: random(*shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
    weights |= {name: 1 + random(HIDDEN, scale=0.1) for name in norms}
    number, tokens = rows // document, document + 1
    return {
        "weights": weights,
        "embedding": random(VOCAB, HIDDEN),
        "head": random(DRAFT_VOCAB, HIDDEN, scale=0.1),
        "ids": torch.randint(VOCAB, (number, tokens), generator=generator),
        "aux": random(number, tokens, 3 * HIDDEN),
        "final": random(number, tokens, HIDDEN),
    }


def ours(rows: int, document: int, bf16: bool) -> tuple[Callable[[], Any], float]:
    import torch

    from eagle3.capture import CapturePoint
    from eagle3.drafter.config import DrafterConfig
    from eagle3.drafter.model import Drafter
    from eagle3.training.loss import training_batch, unroll_loss
    from eagle3.training.samples import TargetParts, TrainingSample

    imported, made = peak(), tensors(rows, document)
    config = DrafterConfig(
        hidden_size=HIDDEN, target_hidden_size=HIDDEN, num_slots=3, intermediate_size=3 * HIDDEN, num_heads=HEADS,
        num_kv_heads=HEADS, head_dim=HIDDEN // HEADS, rope_theta=10000.0, rms_norm_eps=1e-5,
        draft_vocab_size=DRAFT_VOCAB, target_vocab_size=VOCAB, max_positions=8192,
    )  # fmt: skip
    drafter = Drafter(config)
    named = {name.removesuffix(".weight").removeprefix("midlayer."): p for name, p in drafter.named_parameters()}
    set_weights(named, made["weights"])
    parts = TargetParts(made["embedding"], made["head"], torch.ones(HIDDEN), 1e-5, 8)
    samples, valid = [], []
    for ids, aux, final in zip(made["ids"], made["aux"], made["final"], strict=True):
        mask = torch.ones(len(ids) + 1, dtype=torch.bool)
        samples.append(TrainingSample("", torch.cat([ids, ids[:1]]), aux, final, mask))
        valid.append(torch.arange(len(ids)) >= STEPS)  # see `peer`: the first targets of a document do not count
    batch, targets = training_batch(samples, valid, parts, CapturePoint.at_boundary(parts.num_layers), STEPS)
    if batch.num_rows != rows:
        raise SystemExit(f"{batch.num_rows} rows are computed, not {rows}")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)

    def step() -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss, _ = unroll_loss(
                drafter, parts.embedding, parts.head, batch, targets, num_steps=STEPS, decay=DECAY, with_metrics=False
            )
        loss.backward()
        return finish(optimizer, named)

    return step, imported


def peer(rows: int, document: int, bf16: bool) -> tuple[Callable[[], Any], float]:
    import torch
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    imported, made = peak(), tensors(rows, document)
    llama = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=HIDDEN // HEADS, vocab_size=VOCAB, rms_norm_eps=1e-5,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    llama._attn_implementation = "sdpa"
    greedy = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=llama, draft_vocab_size=DRAFT_VOCAB, norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[greedy], default_proposal_method="greedy", verifier=verifier
        ),
    )  # fmt: skip
    model = Eagle3DraftModel(config)
    model.lm_head.weight.requires_grad_(True)
    named = {name.removesuffix(".weight").removeprefix("layers.0."): p for name, p in model.named_parameters()}
    frozen = {"embed_tokens": made["embedding"], "verifier_lm_head": made["head"], "verifier_norm": None}
    with torch.no_grad():
        for name, value in frozen.items():
            parameter = named.pop(name)
            parameter.copy_(value) if value is not None else parameter.fill_(1.0)
    set_weights(named, made["weights"])
    # Its own shift (models/eagle3/data.py): token p + 1, state p, final state p + 1. The mask keeps the last rows of a
    # document from being compared with the next document's first states, as a prompt's mask does.
    mask = torch.arange(document).repeat(rows // document) >= STEPS - 1
    batch = {
        "hidden_states": made["aux"][:, :-1].reshape(1, rows, -1),
        "input_ids": made["ids"][:, 1:].reshape(1, rows),
        "verifier_last_hidden_states": made["final"][:, 1:].reshape(1, rows, -1),
        "document_ids": torch.arange(rows // document).repeat_interleave(document)[None],
        "position_ids": torch.arange(1, document + 1).repeat(rows // document)[None],
        "loss_mask": mask[None],
    }
    del made
    kl = resolve_loss_config("kl_div", implementation="eager")  # its fused losses need Triton
    optimizer = torch.optim.AdamW(named.values(), lr=1e-4, fused=True)

    def step() -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            _, loss, _ = model(**batch, ttt_steps=STEPS, ttt_step_loss_decay=DECAY, loss_config=kl)
        loss.backward()
        return finish(optimizer, named)

    return step, imported


def set_weights(named: dict[str, Any], weights: dict[str, Any]) -> None:
    import torch

    if named.keys() != weights.keys():
        raise SystemExit(f"parameters by other names: {sorted(named.keys() ^ weights.keys())}")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(weights[name])


def finish(optimizer: Any, named: dict[str, Any]) -> dict[str, Any]:
    """The optimiser's step -> the gradients before it."""
    gradients = {name: parameter.grad for name, parameter in named.items()}
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return gradients


def floor(rows: int, dtype: Any) -> float:
    """CPU seconds of the matrix products of a step as it is commonly written: three of each (forward, the gradients of
    input and weight), and the targets' own."""
    import torch

    def seconds(*products: Callable[[], Any]) -> float:
        times = []
        for _ in range(7):
            start = time.process_time()
            for product in products:
                product()
            times.append(time.process_time() - start)
        return statistics.median(times[2:])

    total = 0.0
    middle = 3 * HIDDEN
    each_step = [
        (2 * HIDDEN, 3 * HIDDEN),
        (HIDDEN, HIDDEN),
        (HIDDEN, 2 * middle),
        (middle, HIDDEN),
        (HIDDEN, DRAFT_VOCAB),
    ]
    for width, out, times in [(3 * HIDDEN, HIDDEN, 1), *((*shape, STEPS) for shape in each_step)]:
        x, w, g = (torch.randn(*shape).to(dtype) for shape in ((rows, width), (out, width), (rows, out)))
        total += times * seconds(lambda: x @ w.T, lambda: g @ w, lambda: g.T @ x)  # noqa: B023  # called at once
    x, w = torch.randn(rows, HIDDEN).to(dtype), torch.randn(DRAFT_VOCAB, HIDDEN).to(dtype)
    return total + seconds(lambda: x @ w.T)


if __name__ == "__main__":
    main()
