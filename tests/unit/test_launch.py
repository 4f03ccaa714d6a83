"""The command and environment of a SGLang server, without starting one."""

import json
import os
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from eagle3.conventions import EngineIds
from infra.settings import Settings
from infra.sglang import launch
from infra.sglang.client import SglangError
from infra.sglang.installed import sglang_version
from infra.sglang.launch import (
    STAND_INS,
    CaptureServing,
    DraftServing,
    LaunchError,
    LaunchPlan,
    ServerConfig,
    check_device,
    count_gpus,
    launch_plan,
    uses_latent_attention,
)

pytestmark = pytest.mark.unit

TARGET = Path("models/target")


def ids(*numbers: int, engine: str = "sglang") -> EngineIds:
    return EngineIds(engine=engine, version="0.5.23", model_class="LlamaForCausalLM", ids=numbers)


def plan(settings: Settings | None = None, **config: object) -> LaunchPlan:
    whole = ServerConfig.model_validate({"target": TARGET, "device": "cpu"} | config)
    return launch_plan(whole, 31000, settings or Settings())


def flag(made: LaunchPlan, name: str, count: int = 1) -> list[str]:
    at = made.command.index(name)
    return list(made.command[at + 1 : at + 1 + count])


def test_a_server_listens_on_the_loopback_interface_only() -> None:
    made = plan()
    assert flag(made, "--host") == ["127.0.0.1"]
    assert flag(made, "--port") == ["31000"]
    assert flag(made, "--model-path") == [str(TARGET)]


def test_the_interpreter_is_a_setting() -> None:
    made = plan(Settings(sglang_python=Path("/opt/sglang/bin/python")))
    assert made.command[:3] == ("/opt/sglang/bin/python", "-m", "sglang.launch_server")


def test_a_command_takes_the_interpreters_place() -> None:
    container = "docker run --rm --gpus all -v '/data:/my data' my/sglang python3"
    settings = Settings(sglang_command=f"{container} -m sglang.launch_server")
    words = ("docker", "run", "--rm", "--gpus", "all", "-v", "/data:/my data", "my/sglang", "python3")
    assert plan(settings).command[:12] == (*words, "-m", "sglang.launch_server", "--model-path")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sglang_command": "docker run my/sglang"}, "must end with `-m sglang.launch_server`"),
        ({"sglang_command": "-m sglang.launch_server"}, "after the interpreter"),
        ({"sglang_command": "docker 'run"}, "cannot be split"),
        ({"sglang_command": "python3 -m sglang.launch_server", "sglang_python": "/usr/bin/python3"}, "unset one"),
    ],
)
def test_a_command_that_starts_no_sglang_is_refused(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        plan(Settings.model_validate(settings))


def test_the_version_is_that_of_the_command() -> None:
    assert sglang_version(Settings(sglang_command=f"env A=1 {sys.executable} -m sglang.launch_server")) == "0.5.23"
    with pytest.raises(SglangError, match=r"EAGLE3_SGLANG_COMMAND.*cannot say its version"):
        sglang_version(Settings(sglang_command="false python3 -m sglang.launch_server"))


def test_capture_names_the_layers_and_switches_the_radix_cache_off() -> None:
    made = plan(capture=CaptureServing(ids=ids(2, 15, 27), staging=Path("staging")))
    assert flag(made, "--return-aux-hidden-state-layer-ids", 3) == ["2", "15", "27"]
    assert flag(made, "--speculative-algorithm") == ["EAGLE3"]
    assert {"--enable-return-aux-hidden-states", "--disable-radix-cache"} <= set(made.command)
    assert "--speculative-draft-model-path" not in made.command
    assert made.env["EAGLE3_TAP_DIR"] == "staging"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (ids(-1, 2, 15), "-1 .the embedding. can only be asked for by a drafter's own config"),
        (ids(), "one or more layer ids"),
        (ids(2, 2, 15), "name a layer twice"),
        (ids(2, 15, 27, engine="vllm"), "those of vllm"),
    ],
)
def test_layer_ids_that_capture_mode_does_not_take_are_refused(bad: EngineIds, reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        plan(capture=CaptureServing(ids=bad, staging=Path("staging")))


def test_drafting_names_the_drafter_and_the_shape_of_its_tree() -> None:
    made = plan(draft=DraftServing(path=Path("drafter"), num_steps=5, top_k=2, num_draft_tokens=8))
    assert flag(made, "--speculative-algorithm") == ["EAGLE3"]
    assert flag(made, "--speculative-draft-model-path") == ["drafter"]
    assert flag(made, "--speculative-num-steps") == ["5"]
    assert flag(made, "--speculative-eagle-topk") == ["2"]
    assert flag(made, "--speculative-num-draft-tokens") == ["8"]
    assert "--enable-return-aux-hidden-states" not in made.command
    assert "EAGLE3_TAP_DIR" not in made.env


def test_a_drafting_server_loads_the_tap_where_a_staging_folder_is_named_and_then_keeps_no_prefixes() -> None:
    made = plan(draft=DraftServing(path=Path("drafter"), staging=Path("staging")))
    assert made.env["EAGLE3_TAP_DIR"] == "staging"
    assert "--disable-radix-cache" in made.command
    assert "--enable-return-aux-hidden-states" not in made.command
    assert "--disable-radix-cache" not in plan(draft=DraftServing(path=Path("drafter"))).command


def test_capturing_and_drafting_at_once_is_refused() -> None:
    with pytest.raises(LaunchError, match="either captures or drafts"):
        plan(
            capture=CaptureServing(ids=ids(1, 3, 5), staging=Path("staging")), draft=DraftServing(path=Path("drafter"))
        )


def test_a_cpu_server_gets_the_stand_ins_and_idle_threads_that_sleep() -> None:
    made = plan(threads=2)
    assert made.device == "cpu"
    assert made.env["PYTHONPATH"] == str(STAND_INS)
    assert {
        "EAGLE3_SGLANG_CPU": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "2",
        "GOMP_SPINCOUNT": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }.items() <= made.env.items()
    assert flag(made, "--cuda-graph-backend-decode") == ["disabled"]
    assert flag(made, "--dtype") == ["float32"]


def test_a_gpu_server_gets_nothing_of_the_cpu_path() -> None:
    made = plan(device="cuda", capture=CaptureServing(ids=ids(2, 30, 58), staging=Path("staging")))
    assert made.env == {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "EAGLE3_TAP_DIR": "staging"}
    cpu_only = {"--attention-backend", "--sampling-backend", "--max-total-tokens", "--mem-fraction-static"}
    assert not cpu_only & set(made.command)
    assert "--cuda-graph-backend-decode" not in made.command
    assert flag(made, "--cuda-graph-backend-prefill") == ["disabled"]
    assert "--cuda-graph-backend-prefill" not in plan(device="cuda").command
    assert flag(made, "--dtype") == ["auto"]
    assert flag(plan(device="cuda", disable_cuda_graph=True), "--cuda-graph-backend-decode") == ["disabled"]


def test_a_machine_without_a_visible_gpu_serves_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus() == 0
    assert plan(device="auto").device == "cpu"
    assert plan(Settings(sglang_device="cuda"), device="auto").device == "cuda"
    assert plan(Settings(sglang_device="cuda"), device="cpu").device == "cpu"


def test_the_device_must_fit_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "count_gpus", lambda: 0)  # this machine has one kind only
    check_device("cpu", Settings())
    with pytest.raises(LaunchError, match="no NVIDIA GPU answers"):
        check_device("cuda", Settings())
    monkeypatch.setattr(launch, "count_gpus", lambda: 2)
    check_device("cuda", Settings(sglang_python=Path("/opt/sglang/bin/python")))
    with pytest.raises(LaunchError, match=r'2 NVIDIA GPUs are visible.*CUDA_VISIBLE_DEVICES=""'):
        check_device("cpu", Settings())
    with pytest.raises(LaunchError, match=r"this environment is the CPU's.*EAGLE3_SGLANG_PYTHON"):
        check_device("cuda", Settings())


def test_sizes_are_passed_on_and_bounded_on_the_cpu() -> None:
    made = plan(max_running_requests=64, chunked_prefill_size=128)
    assert flag(made, "--max-running-requests") == ["64"]
    assert flag(made, "--chunked-prefill-size") == ["128"]
    assert flag(made, "--max-total-tokens") == ["16384"]


def test_further_arguments_come_last_and_cannot_open_the_server_or_show_a_key() -> None:
    made = plan(extra_args=("--quantization", "fp8"), trust_remote_code=True)
    assert made.command[-2:] == ("--quantization", "fp8")
    assert "--trust-remote-code" in made.command
    for bad in ("--host=0.0.0.0", "--api-key", "--api-k", "--config", "--port"):
        with pytest.raises(LaunchError, match="set by us"):
            plan(extra_args=(bad,))


def test_the_api_key_is_in_nothing_that_is_printed() -> None:
    made = plan(Settings(sglang_api_key=SecretStr("sesame-0123456789")))
    assert made.api_key is not None
    assert "sesame" not in f"{made!r} {made} {made.env} {made.command}"
    with pytest.raises(LaunchError) as refused:
        plan(Settings(sglang_api_key=SecretStr("open'sesame")))
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize("nested", [False, True], ids=["DeepSeek", "nested in text_config"])
def test_latent_attention_on_the_cpu_is_served_without_cached_prefixes(tmp_path: Path, nested: bool) -> None:
    text = {"kv_lora_rank": 32}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text} if nested else text))
    assert uses_latent_attention(tmp_path)
    made = plan(target=tmp_path)
    assert "--disable-radix-cache" in made.command
    assert flag(made, "--chunked-prefill-size") == ["-1"]
    with pytest.raises(LaunchError, match="chunked_prefill_size is 64"):
        plan(target=tmp_path, chunked_prefill_size=64)
    on_gpu = plan(target=tmp_path, device="cuda")
    assert not {"--disable-radix-cache", "--chunked-prefill-size"} & set(on_gpu.command)


def test_each_tensor_parallel_process_gets_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [3, 5, 7]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    made = plan(tensor_parallel=2)
    assert flag(made, "--tp-size") == ["2"]
    assert made.env["SGLANG_CPU_OMP_THREADS_BIND"] == f"{cores[0]}|{cores[1]}"
    with pytest.raises(LaunchError, match=f"may use {len(cores)}"):
        plan(tensor_parallel=2, threads=len(cores))


def test_each_replica_gets_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [3, 5, 7, 9]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    made = plan(data_parallel=2, tensor_parallel=2)
    assert (flag(made, "--tp-size"), flag(made, "--dp-size")) == (["2"], ["2"])
    assert made.env["SGLANG_CPU_OMP_THREADS_BIND"] == "3|5|7|9"
    assert "--dp-size" not in plan().command
