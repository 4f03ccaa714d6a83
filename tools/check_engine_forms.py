"""Do the engines' own config classes and loaders take a drafter in the form that we write for them?

    python tools/check_engine_forms.py --python OTHER/bin/python

writes tiny drafters in each form and lets the interpreter of another environment, which has vLLM and speculators, load
them: vLLM resolves the configs (its ModelConfig and SpeculativeConfig), builds its own model class on the CPU and loads
the weights into it; speculators loads its own model. Every parameter must then hold exactly our tensor. Neither engine
belongs in this project's environment. One that did (no GPU, torch's CPU build; vLLM's own pins want CUDA's):

    python3.11 -m venv OTHER
    OTHER/bin/pip install torch==2.13.0 transformers==5.19.0 -r tools/check_engine_forms.txt
    OTHER/bin/pip install --no-deps vllm==0.33.0 speculators==0.9.0
    OTHER/bin/pip install --no-deps compressed-tensors==0.17.0 hs-connectors==0.9.0 depyf

Exit code 0: all taken; 1: something was not; the table says which.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

VERSIONS = {"sglang": "0.5.23", "vllm": "0.33.0", "speculators": "0.9.0"}
# name, attention, norm flags, whole vocabulary
CASES: tuple[tuple[str, str, dict[str, bool], bool], ...] = (
    ("llama", "llama", {}, False),
    ("llama-3.1", "llama", {"fc_norm": True, "norm_output": True}, False),
    ("llama-fc-norm", "llama", {"norm_before_fc": True}, False),
    ("llama-residual", "llama", {"norm_before_residual": True}, False),
    ("llama-whole-vocabulary", "llama", {}, True),
    ("mla", "mla", {}, False),
    ("mla-3.1", "mla", {"fc_norm": True, "norm_output": True}, False),
    ("mla-residual", "mla", {"norm_before_residual": True}, False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="interpreter of an environment with vLLM and speculators")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        sys.exit(check(arguments.inside))
    if not arguments.python:
        parser.error("--python is needed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        command = [str(arguments.python), __file__, "--inside", str(folder)]
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)


def write(folder: Path) -> None:
    """Two tiny targets and their drafters, in the form of each engine that has the flags."""
    from eagle3.capture import CapturePoint, CaptureSpec
    from eagle3.conventions import ids_of
    from eagle3.drafter.checkpoint import contract_for, save_checkpoint
    from eagle3.drafter.config import DrafterConfig, DrafterConfigError, MlaDrafterConfig
    from eagle3.drafter.mla import build_drafter
    from eagle3.drafter.vocab import VocabMap
    from eagle3.refs import DumpRef
    from eagle3.target import Target
    from tests.targets import make_deepseek, make_llama

    targets = {
        "llama": Target.open(make_llama(folder / "target-llama")),
        "mla": Target.open(make_deepseek(folder / "target-mla")),
    }
    points = tuple(CapturePoint(f"layers.{layer}") for layer in (1, 3, 5))
    for number, (name, kind, flags, whole) in enumerate(CASES):
        target = targets[kind]
        torch.manual_seed(number)
        vocab = VocabMap(torch.arange(0, target.vocab_size, 1 if whole else 2), target.vocab_size)
        shape = (MlaDrafterConfig if kind == "mla" else DrafterConfig).like_target(
            target, num_slots=3, draft_vocab_size=len(vocab), norm=flags
        )
        drafter = build_drafter(shape)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.normal_()
        contract = contract_for(
            drafter,
            vocab,
            capture=CaptureSpec(aux=points),
            target=target.identity().model_copy(update={"name": str(target.path)}),
            tokenizer=target.tokenizer_identity(),
            dump=DumpRef(uri="file:///made-up", sha256="d" * 64),
            report_sha256="e" * 64,
        )
        for engine, version in VERSIONS.items():
            ids = ids_of(
                points,
                engine=engine,
                version=version,
                model_class=target.model_class,
                num_layers=target.num_layers,
            )
            try:
                save_checkpoint(folder / engine / name, drafter, vocab, contract, ids)
            except DrafterConfigError:
                continue  # an engine that has not the flag, or no latent attention


def check(folder: Path) -> int:
    """Inside the other environment: every case, one line each."""
    failed = 0
    for engine, name, load in cases(folder):
        try:
            said = load(folder / engine / name)
        except Exception as error:  # noqa: BLE001  whatever an engine raises is a finding
            failed += 1
            said = f"REFUSED: {type(error).__name__}: {str(error)[:600]}"
        print(f"{engine:<12} {name:<24} {said}", flush=True)
    return 1 if failed else 0


def cases(folder: Path) -> Iterator[tuple[str, str, Callable[[Path], str]]]:
    loaders: dict[str, Callable[[Path], str]] = {"vllm": in_vllm, "speculators": in_speculators}
    for engine, load in loaders.items():
        for name, *_ in CASES:
            if (folder / engine / name).exists():
                yield engine, name, load
    for name, *_ in CASES:  # vLLM takes speculators' form too
        if (folder / "speculators" / name).exists():
            yield "speculators", name, in_vllm


def in_vllm(folder: Path) -> str:
    """Config classes, model class and loader of vLLM."""
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config
    from vllm.config.device import DeviceConfig
    from vllm.model_executor.models.registry import ModelRegistry

    raw = json.loads((folder / "config.json").read_text())
    kind = "mla" if "mla" in folder.name else "llama"
    target = folder.parents[1] / f"target-{kind}"
    model_config = ModelConfig(model=str(target), dtype="float32", max_model_len=256)
    speculative = SpeculativeConfig(
        model=str(folder),
        method="eagle3",
        num_speculative_tokens=3,
        target_model_config=model_config,
        target_parallel_config=ParallelConfig(),
    )
    drafted = speculative.draft_model_config.hf_config
    assert speculative.method == "eagle3", speculative.method
    assert tuple(drafted.eagle_aux_hidden_state_layer_ids) == (2, 4, 6), "what gpu_model_runner asks the target for"
    config = VllmConfig(model_config=model_config, speculative_config=speculative, device_config=DeviceConfig("cpu"))
    start_distributed(config)
    with set_current_vllm_config(config):
        model_class, _ = ModelRegistry.resolve_model_cls(drafted.architectures, speculative.draft_model_config)
        torch.manual_seed(99)
        model = model_class(vllm_config=config)
    tensors = load_file(folder / "model.safetensors")
    model.load_weights(iter(tensors.items()))
    compared = compare_vllm(dict(model.named_parameters()), tensors)
    inner = model.model
    flags = {
        "fc_norm": inner.fc_norm is not None,
        "norm_output": bool(inner.norm_output),
        "norm_before_residual": inner.layers[0]._residual_norm.__name__ == "_norm_before_residual",
    }
    for flag, found in flags.items():
        assert found == raw.get(flag, False), (flag, found)
    if kind == "mla":
        check_rotary(inner.layers[0].self_attn, raw)
    return f"taken by vLLM's {model_class.__name__}: {compared} parameters hold our tensors"


def check_rotary(attention: Any, raw: dict[str, Any]) -> None:
    """YaRN's share of the softmax scale, and pairs that turn interleaved: no tensor shows either."""
    width, yarn = raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"], raw["rope_scaling"]
    share = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1
    assert math.isclose(attention.scaling, width**-0.5 * share**2, rel_tol=1e-6), attention.scaling
    assert attention.rotary_emb.is_neox_style is False


_STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def compare_vllm(parameters: dict[str, Tensor], tensors: dict[str, Tensor]) -> int:
    """Each parameter of vLLM's model is ours, stacked as vLLM stacks; padded rows of the head follow ours."""
    ours = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    used: set[str] = {"t2d"} & ours.keys()
    compared = 0
    for name, parameter in parameters.items():
        if "embed_tokens" in name:
            continue  # the target's, shared after loading
        key = name.removeprefix("model.").replace("draft_id_to_target_id", "d2t")
        key = key.replace("mla_attn.", "")
        module = key.split(".")[-2] if "." in key else key
        parts = [key.replace(module, part) for part in _STACKED.get(module, (module,))]
        wanted = torch.cat([ours[part] for part in parts])
        assert torch.equal(parameter.detach()[: len(wanted)].to(wanted.dtype), wanted), name
        used |= set(parts)
        compared += 1
    assert used == ours.keys(), f"not taken: {sorted(ours.keys() - used)}"
    return compared


def start_distributed(config: Any) -> None:
    """vLLM's parallel layers want a process group, of one process here."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    store = Path(tempfile.mkdtemp()) / "store"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        initialize_model_parallel(1, 1)


def in_speculators(folder: Path) -> str:
    """Config class, model class and loader of speculators."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(str(folder))
    assert list(config.eagle_aux_hidden_state_layer_ids) == [2, 4, 6]
    model = SpeculatorModel.from_pretrained(str(folder))
    state, tensors = model.state_dict(), load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name
    extra = {name for name in state.keys() - tensors.keys() if not name.startswith(("verifier_", "embed_tokens"))}
    assert not extra, f"left unset: {sorted(extra)}"
    return f"taken by speculators' {type(model).__name__}: {len(tensors)} tensors are ours"


if __name__ == "__main__":
    main()
