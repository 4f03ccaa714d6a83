"""`eagle3 plan`: the figures, where they come from, and what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest

from eagle3.capture import CaptureError
from eagle3.drafter.config import DrafterConfigError
from eagle3.prompts import PromptError
from eagle3.target import Target
from infra.settings import Settings
from infra.store import open_store
from tasks.advice import data_advice
from tasks.estimate import PlanParams, PromptTokens, duration, estimate, size
from tasks.inputs import prompt_parts
from tasks.params import AnswerParams, ExtractParams, PipelineParams, PromptParams
from tasks.planning import announce_extraction
from tasks.room import NoRoom
from tests.command import eagle3
from tests.targets import CONTEXT

pytestmark = pytest.mark.unit

KIMI = Path(__file__).resolve().parents[2] / "configs" / "kimi-k2.5.yaml"
FITS, ERROR, USAGE, UNKNOWN = 0, 1, 2, 3
NUM_PROMPTS = 6
PER_TOKEN = 3 * 64 * 4  # two aux states and the final one, hidden 64, float32


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EAGLE3_STORE", (tmp_path / "store").as_uri())
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Tom has {n} apples and eats {n % 3}.", "split": "train"} for n in range(NUM_PROMPTS)]
    lines += [{"prompt": f"Ann has {n} pears.", "split": "heldout"} for n in range(2)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def config(tiny_llama: Path, tmp_path: Path, prompts: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(
        f"target: {{path: {tiny_llama}}}\nprompts: {{file: {prompts}, num_heldout: 2}}\n"
        "capture: {aux: [layers.1, layers.3]}\nanswers: {max_new_tokens: 20}\nserving: {device: cpu}\nmismatch: null\n"
    )
    return file


def tokens_of(tiny_llama: Path, prompts: Path) -> int:
    target = Target.open(tiny_llama)
    train, _ = prompt_parts(PromptParams(file=str(prompts), num_heldout=2), AnswerParams(max_new_tokens=20), target)
    return sum(len(prompt.input_ids) for prompt in train.prompts)


def test_figures_come_from_the_prompts_as_the_tokenizer_of_this_machine_writes_them(
    config: Path, tiny_llama: Path, prompts: Path
) -> None:
    tokens = tokens_of(tiny_llama, prompts)
    said = eagle3("plan", "--config", config, "--json")
    assert said.code == FITS, said
    plan = said.json
    assert plan["verdict"] == "fits"
    figures = plan["estimate"]
    assert figures["prompts"]["known"] == "tokenised"
    assert (figures["prompts"]["num_prompts"], figures["prompts"]["tokens"]) == (NUM_PROMPTS, tokens)
    assert figures["rows"] == figures["most_rows"] == tokens + NUM_PROMPTS * (20 - 1)
    assert figures["bytes_per_token"] == PER_TOKEN
    assert figures["most_bytes"] == figures["rows"] * (PER_TOKEN + 9)
    assert figures["money"] is None
    staging, store = plan["rooms"]
    assert (staging["what"], staging["needed"]) == ("staging disk", 2 * figures["most_bytes"])
    assert (store["what"], store["needed"]) == ("store's disk", 3 * figures["most_bytes"])  # one disk for both


def test_the_plan_states_what_it_assumes_and_starts_nothing(config: Path, tmp_path: Path) -> None:
    said = eagle3("plan", "--config", config)
    assert said.code == FITS
    for words in (
        "by the target's tokenizer",
        "reads 500 tokens/s and writes 95",
        "20 tokens, the most allowed",
        "no GPU is used",
    ):
        assert words in said.out
    assert "are free" in said.out
    assert not (tmp_path / "store").exists()


def test_without_the_files_tokens_and_money_are_assumed_and_the_workers_disk_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EAGLE3_STORE", "s3://eagle3")  # no quota is set: it is not asked
    said = eagle3("plan", "--config", KIMI, "--price", "2.5", "--json")
    assert said.code == UNKNOWN
    figures = said.json["estimate"]
    assert figures["prompts"]["known"] == "assumed"
    assert figures["rows"] == 30000 * (400 + 1000 - 1)
    reading = (30000 * 400 + figures["rows"]) / 12000  # the answers are read again: answer_then_prefill
    assert figures["seconds"] == pytest.approx(reading + 30000 * 1000 / 2000)
    assert figures["money"] == pytest.approx(8 * figures["seconds"] / 3600 * 2.5)
    assert any("a prompt has 400 tokens" in line for line in figures["assumptions"])
    assert any("a GPU-hour costs 2.5 USD" in line for line in figures["assumptions"])
    (room,) = [room for room in said.json["rooms"] if room["what"] == "staging disk"]
    assert room["free"] is None
    dry = eagle3("run", "--config", KIMI, "--dry-run", "--json")
    assert (dry.code, dry.json["estimate"]["rows"]) == (0, figures["rows"])


def test_without_the_tokenizer_the_text_is_measured(prompts: Path, tmp_path: Path) -> None:
    config = tmp_path / "kimi.yaml"
    config.write_text(
        re.sub(
            r"file: .*\n  num_train: 30000\n  num_heldout: 200", f"file: {prompts}\n  num_heldout: 2", KIMI.read_text()
        )
    )
    said = eagle3("plan", "--config", config, "--json")
    figures = said.json["estimate"]
    assert figures["prompts"]["known"] == "estimated"
    texts = [f"Tom has {n} apples and eats {n % 3}." for n in range(NUM_PROMPTS)]
    assert figures["prompts"]["tokens"] == sum(round(len(text) / 3) for text in texts)
    assert any("a token is 3 bytes of text" in line for line in figures["assumptions"])


@pytest.mark.parametrize("split", ["train", "heldout", "also"])
def test_a_prompt_that_is_longer_than_the_context_is_refused_by_its_name(
    config: Path, prompts: Path, tmp_path: Path, split: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wherever it stands, and by `run --dry-run` as well; of transformers nothing is heard."""
    line = json.dumps(
        {"id": "long one", "prompt": "apples " * CONTEXT, **({"split": split} if split != "also" else {})}
    )
    if split == "also":
        (tmp_path / "also.jsonl").write_text(line + "\n")
        config.write_text(config.read_text() + f"also: [{tmp_path / 'also.jsonl'}]\n")
    else:
        prompts.write_text(line + "\n" + prompts.read_text())
        config.write_text(config.read_text().replace("num_heldout: 2", f"num_heldout: {2 + (split == 'heldout')}"))
    for command in (["plan"], ["run", "--dry-run"]):
        with pytest.raises(PromptError, match=rf"prompt long one has .* the target's context of {CONTEXT} leaves"):
            eagle3(*command, "--config", config)
    assert "transformers" not in capfd.readouterr().err


def test_a_prompt_that_the_cache_cannot_hold_is_refused_before_a_server_starts(
    config: Path, prompts: Path, tiny_llama: Path
) -> None:
    """One token of the cache is never used, and one more of a request."""
    train, _ = prompt_parts(
        PromptParams(file=str(prompts), num_heldout=2), AnswerParams(max_new_tokens=20), Target.open(tiny_llama)
    )
    longest = max(len(prompt.input_ids) for prompt in train.prompts)
    text, enough = config.read_text(), longest + 20 + 2
    config.write_text(text.replace("serving: {", f"serving: {{max_total_tokens: {enough}, "))
    assert eagle3("plan", "--config", config).code == FITS
    config.write_text(text.replace("serving: {", f"serving: {{max_total_tokens: {enough - 1}, "))
    with pytest.raises(PromptError, match=rf"has {longest} tokens .* up to 20, .*serving\.max_total_tokens"):
        eagle3("plan", "--config", config)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        (
            "mismatch",
            "{points: [embed, layers.8]}",
            CaptureError,
            r"mismatch\.points: .* no layers\.8.*`mismatch: null`",
        ),
        ("drafter", "{num_kv_heads: 3}", DrafterConfigError, "heads cannot share 3 key-value heads"),
        ("also", "[not/here.jsonl]", PromptError, r"no prompts file not/here\.jsonl"),
    ],
)
def test_what_a_later_stage_would_refuse_is_refused_by_the_plan(
    config: Path, key: str, value: str, error: type[Exception], message: str
) -> None:
    config.write_text(config.read_text().replace("mismatch: null\n", "mismatch: null\n" if key != "mismatch" else ""))
    config.write_text(config.read_text() + f"{key}: {value}\n")
    with pytest.raises(error, match=message):
        eagle3("plan", "--config", config)


def test_far_too_little_data_is_told_with_figures(config: Path) -> None:
    said = eagle3("plan", "--config", config)
    assert said.code == FITS
    careful = said.out[said.out.index("careful ") : said.out.index("environment ")]
    for words in (
        f"{NUM_PROMPTS} training prompts are few: the demo's 126",
        f"250 steps of 2 samples are 83 passes over {NUM_PROMPTS} samples",
        f"at most {NUM_PROMPTS * 20} tokens, the draft vocabulary 4,096",
    ):
        assert words in careful
    assert "simulated acceptance" not in careful
    few = eagle3("run", "--config", config, "--num-train", "4", "--dry-run", "--json")
    assert any("of 4 samples none is left for the simulated acceptance" in line for line in few.json["advice"])


def test_the_demos_own_prompts_and_kimis_plan_need_no_advice() -> None:
    demo = PipelineParams()
    assert data_advice(demo, 126, 126 * demo.answers.max_new_tokens) == ()
    assert eagle3("run", "--config", KIMI, "--dry-run", "--json").json["advice"] == []


def test_without_the_tokenizer_a_prompt_that_is_probably_too_long_is_named(prompts: Path, tmp_path: Path) -> None:
    prompts.write_text(json.dumps({"id": "book", "prompt": "word " * 160_000}) + "\n" + prompts.read_text())
    config = tmp_path / "kimi.yaml"
    text = KIMI.read_text().replace("file: prompts/train.jsonl", f"file: {prompts}")
    config.write_text(text.replace("num_train: 30000", "num_train: 7").replace("num_heldout: 200", "num_heldout: 2"))
    said = eagle3("run", "--config", config, "--dry-run")
    assert "prompt book has about 266,667 tokens (estimated)" in said.out
    assert "the target's context of 262,144" in said.out


def test_a_staging_disk_that_is_too_small_is_refused_and_the_message_says_by_how_much(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    config = tmp_path / "huge.yaml"
    config.write_text(KIMI.read_text().replace("max_new_tokens: 2048", "max_new_tokens: 900000000"))
    with pytest.raises(NoRoom, match=r"staging disk .* lack: free them, or set EAGLE3_HOME") as refused:
        eagle3("plan", "--config", config, "--staging", tmp_path / "not" / "made")
    found = re.search(r"up to ([\d.,]+ TB) are needed, ([\d.]+ \w+) are free", str(refused.value))
    assert found is not None
    assert found[2][:2] == size(free)[:2]


def test_a_quota_that_does_not_suffice_is_refused(
    config: Path, tiny_llama: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = (tokens_of(tiny_llama, prompts) + NUM_PROMPTS * 19) * (PER_TOKEN + 9)
    open_store((tmp_path / "store").as_uri(), Settings()).put_bytes("dumps/a/shard", bytes(1000))
    monkeypatch.setenv("EAGLE3_STORE_QUOTA", str(most + 1000))
    assert eagle3("plan", "--config", config).code == FITS
    monkeypatch.setenv("EAGLE3_STORE_QUOTA", str(most + 999))
    with pytest.raises(NoRoom, match=r"store's quota .* 1 bytes lack \(1 kB of .* are taken\): make room"):
        eagle3("plan", "--config", config)


def test_a_store_that_cannot_be_asked_for_its_quota_is_no_verdict(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("EAGLE3_STORE", "s3://test-bucket")
    monkeypatch.setenv("EAGLE3_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("EAGLE3_S3_ACCESS_KEY", "a")
    monkeypatch.setenv("EAGLE3_S3_SECRET_KEY", "b")
    monkeypatch.setenv("EAGLE3_S3_RETRIES", "0")
    monkeypatch.setenv("EAGLE3_STORE_QUOTA", "1TB")
    said = eagle3("plan", "--config", config)
    assert said.code == UNKNOWN
    assert "does not answer" in said.out


def test_an_extraction_says_its_plan_and_is_refused_where_the_quota_does_not_suffice(
    tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    params = ExtractParams.model_validate(
        {
            "target": {"path": str(tiny_llama)},
            "prompts": {"file": str(prompts), "num_heldout": 2},
            "answers": {"max_new_tokens": 20},
            "serving": {"device": "cpu"},
        }
    )
    train, _ = prompt_parts(params.prompts, params.answers, Target.open(tiny_llama))
    said: list[str] = []
    settings = Settings(home=tmp_path, store=(tmp_path / "store").as_uri(), store_quota=10**9)
    figures = announce_extraction(params, train.prompts, PER_TOKEN, settings, said.append)
    assert figures.prompts.tokens == tokens_of(tiny_llama, prompts)
    assert any("plan: tokens: " in line for line in said)
    assert any("plan: assumed: one server reads" in line for line in said)
    with pytest.raises(NoRoom, match="store's quota"):
        announce_extraction(
            params, train.prompts, PER_TOKEN, settings.model_copy(update={"store_quota": 9}), said.append
        )


def test_a_quota_that_cannot_be_asked_for_stops_an_extraction(tiny_llama: Path, prompts: Path, tmp_path: Path) -> None:
    params = ExtractParams.model_validate({"prompts": {"file": str(prompts), "num_heldout": 2}})
    train, _ = prompt_parts(params.prompts, params.answers, Target.open(tiny_llama))
    unreachable = {"s3_endpoint": "http://127.0.0.1:9", "s3_access_key": "a", "s3_secret_key": "b", "s3_retries": 0}
    settings = Settings.model_validate(
        {"home": tmp_path, "store": "s3://test-bucket", "store_quota": "1TB"} | unreachable
    )
    with pytest.raises(NoRoom, match=r"does not answer .* or unset EAGLE3_STORE_QUOTA"):
        announce_extraction(params, train.prompts, PER_TOKEN, settings, lambda _: None)


def test_given_conversations_are_planned_as_they_are(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "given.jsonl"
    turns = [("user", "How many apples?"), ("assistant", "Three apples, and one pear.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    lines = [{"id": str(n), "messages": [{**messages[0], "content": f"{n} apples?"}, messages[1]]} for n in range(5)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config.write_text(config.read_text().replace("answers: {", "answers: {source: given, "))
    said = eagle3("plan", "--config", config, "--prompts", file, "--json")
    assert said.code == FITS, said
    figures, prompts = said.json["estimate"], said.json["estimate"]["prompts"]
    assert (prompts["num_prompts"], prompts["known"]) == (3, "tokenised")
    assert prompts["given"] > 3
    assert figures["rows"] == figures["most_rows"] == prompts["tokens"] + prompts["given"] - 3
    assert figures["answering_seconds"] == 0


def test_given_answers_are_read_once_and_never_written() -> None:
    prompts = PromptTokens(num_prompts=10, tokens=1000, given=500, longest=200, known="tokenised", where="x")
    options = {"max_new_tokens": 99, "bytes_per_token": 100, "row_bytes": 9, "read_again": False, "num_gpus": 2}
    figures = estimate(PlanParams(prefill_tokens_per_second=10, price_per_gpu_hour=36), prompts, **options)
    assert figures.rows == figures.most_rows == 1490
    assert (figures.answering_seconds, figures.seconds) == (0, 149)
    assert figures.money == pytest.approx(2 * 149 / 3600 * 36)


def test_a_slow_store_is_what_takes_the_time() -> None:
    prompts = PromptTokens(num_prompts=1, tokens=10**6, longest=10**6, known="assumed", where="x")
    options = {"max_new_tokens": 2, "bytes_per_token": 10**4, "row_bytes": 0, "read_again": False, "num_gpus": 0}
    figures = estimate(PlanParams(upload_mb_per_second=1), prompts, **options)
    assert figures.seconds == figures.upload_seconds > 9000


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (size(999), "999 bytes"),
        (size(57_344), "57.3 kB"),
        (size(4.21e12), "4.21 TB"),
        (size(3.2e15), "3,200.00 TB"),
        (duration(119), "119 s"),
        (duration(3600), "60 min"),
        (duration(86400), "24.0 h"),
        (duration(5 * 86400), "5.0 days"),
    ],
)
def test_figures_are_told_for_people(told: str, words: str) -> None:
    assert told == words
