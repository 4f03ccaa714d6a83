"""Tiny targets that have learnt something: a Llama and a DeepSeek-V3 trained in seconds, and drafters for them.

Random weights answer at random: nothing can be drafted, so nothing is lost where a drafter gets the wrong states. These
learn the code tables of Python's own `encodings` package, text of so much structure that a drafter of a minute is right
about every second time. Everything is seeded.
"""

import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import DeepseekV3ForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3.capture import CapturePoint, CaptureSpec
from eagle3.conventions import ids_of
from eagle3.drafter.checkpoint import contract_for, save_checkpoint
from eagle3.drafter.config import DrafterConfig, MlaDrafterConfig
from eagle3.drafter.vocab import VocabMap, count_tokens
from eagle3.refs import DumpRef
from eagle3.target import Target
from eagle3.training.config import TrainingConfig
from eagle3.training.loop import train
from eagle3.training.samples import NORM, TargetParts, TrainingSample
from tests.targets import TEMPLATE, VOCAB, deepseek_config, llama_config

ENGINE_VERSION = "0.5.23"
PROMPT, ANSWER = 32, 48  # tokens
_HELDOUT_FILES = 4
_BATCH, _WINDOW = 8, 96  # sequences and tokens of a training step of a target
_MUON_RATE, _ADAM_RATE = 0.03, 5e-3
_DRAFTER_SAMPLES = 192


@dataclass(frozen=True)
class Corpus:
    """Token ids of the texts to learn, of others to ask about, and the tokenizer that made them."""

    train: Tensor  # [n] int64
    heldout: Tensor  # [m] int64
    tokenizer: Tokenizer

    def prompts(self, num: int, *, seed: int, heldout: bool = True) -> list[list[int]]:
        """`num` pieces of PROMPT tokens."""
        text = self.heldout if heldout else self.train
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, len(text) - PROMPT, (num,), generator=generator)
        return [text[start : start + PROMPT].tolist() for start in starts.tolist()]


@cache
def corpus() -> Corpus:
    """The code tables of `encodings`, without the comments' few characters outside ASCII."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / "encodings"
    files = sorted(path for path in folder.glob("cp*.py") if path.stat().st_size > 8000)
    random.Random(0).shuffle(files)
    texts = [path.read_text(encoding="ascii", errors="replace") for path in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[_HELDOUT_FILES:], trainer)

    def ids(chosen: Sequence[str]) -> Tensor:
        return torch.tensor([i for encoded in tokenizer.encode_batch(chosen) for i in encoded.ids])

    return Corpus(ids(texts[_HELDOUT_FILES:]), ids(texts[:_HELDOUT_FILES]), tokenizer)


def train_llama(folder: Path, *, steps: int = 200) -> Path:
    """A Llama of 8 layers of width 64. 200 steps: 17 CPU-seconds, held-out loss 1.12 and 69% of tokens right."""
    torch.manual_seed(0)
    return _train(LlamaForCausalLM(llama_config(initializer_range=0.1)), folder, steps)


def train_deepseek(folder: Path, *, steps: int = 300) -> Path:
    """A DeepSeek-V3 (MLA, dense) of the same size. 300 steps: 40 CPU-seconds, loss 1.07 and 70% right."""
    torch.manual_seed(0)
    return _train(DeepseekV3ForCausalLM(deepseek_config(initializer_range=0.1)), folder, steps)


def _train(model: Any, folder: Path, steps: int) -> Path:
    """Muon on the matrices inside, AdamW on the rest: at this size the quickest way to a model that knows its text."""
    text = corpus().train
    inner = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = (
        torch.optim.Muon(inner, lr=_MUON_RATE, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=_ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )
    generator = torch.Generator().manual_seed(0)
    model.train()
    for step in range(steps):
        scale = min(1.0, (step + 1) / 20) * max(0.02, min(1.0, 2 * (1 - step / steps)))
        for optimizer, rate in zip(optimizers, (_MUON_RATE, _ADAM_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        starts = torch.randint(0, len(text) - _WINDOW - 1, (_BATCH,), generator=generator)
        ids = torch.stack([text[start : start + _WINDOW + 1] for start in starts.tolist()])  # [B, T + 1]
        logits = model(ids[:, :-1], use_cache=False).logits  # [B, T, V]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=corpus().tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@torch.no_grad()
def greedy(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompt and ANSWER tokens of plain greedy decoding, which the end-of-text token does not end."""
    ids = torch.tensor([list(prompt) for prompt in prompts])
    whole: list[list[int]] = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=ANSWER,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=2,
    ).tolist()
    return whole


def train_drafter(
    target_folder: Path, points: Sequence[str], folder: Path, *, steps: int = 150, latent: bool = False
) -> Path:
    """Our own trainer on greedy answers of the target; a checkpoint with its contract, exported for SGLang 0.5.23.

    `latent`: with the target's own latent attention instead of Llama's.
    """
    target = Target.open(target_folder)
    model = target.load_model(torch.float32)
    aux = tuple(CapturePoint(point) for point in points)
    texts = greedy(model, corpus().prompts(_DRAFTER_SAMPLES, seed=1, heldout=False))
    samples = [sample(target, model, ids, aux) for ids in texts]
    vocab = VocabMap.most_frequent(
        count_tokens(((s.input_ids, s.loss_mask) for s in samples), target.vocab_size), VOCAB // 2
    )
    parts = TargetParts.of(target, latent=latent)
    shape = (MlaDrafterConfig if latent else DrafterConfig).like_target(
        target, num_slots=len(aux), draft_vocab_size=len(vocab)
    )
    recipe = TrainingConfig(budget=steps, budget_unit="steps", batch_size=8, learning_rate=5e-3, bf16=False)
    drafter = train(samples, [], parts, shape, vocab, recipe).drafter
    contract = contract_for(
        drafter,
        vocab,
        capture=CaptureSpec(aux=aux),
        target=target.identity(),
        tokenizer=target.tokenizer_identity(),
        dump=DumpRef(uri="file:///computed-by-transformers", sha256="d" * 64),
        report_sha256="e" * 64,
    )
    ids = ids_of(
        aux,
        engine="sglang",
        version=ENGINE_VERSION,
        model_class=target.model_class,
        num_layers=target.num_layers,
    )
    save_checkpoint(folder, drafter, vocab, contract, ids)
    return folder


def sample(target: Target, model: Any, ids: list[int], aux: Sequence[CapturePoint]) -> TrainingSample:
    """A prompt and its answer (from `greedy`), with the target's own states at these points."""
    states = target.hidden_states(model, ids[:-1])
    return TrainingSample(
        id=f"text-{hash(tuple(ids))}",
        input_ids=torch.tensor(ids),
        aux=torch.cat([states[point] for point in aux], dim=-1),
        final=states[NORM],
        loss_mask=torch.arange(len(ids)) >= PROMPT,
    )
