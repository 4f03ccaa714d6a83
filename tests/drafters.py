"""Small drafters, their contracts, and a dump that is made up so that a drafter can learn it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.capture import CaptureSpec
from eagle3.contract import DrafterContract, NormFlags
from eagle3.conventions import EngineIds
from eagle3.drafter.checkpoint import contract_for
from eagle3.drafter.config import DrafterConfig
from eagle3.drafter.model import Drafter
from eagle3.drafter.vocab import VocabMap
from eagle3.dump.manifest import TargetIdentity, TokenizerIdentity
from eagle3.refs import DumpRef
from eagle3.training.samples import TargetParts, TrainingSample

HIDDEN, VOCAB, DRAFT_VOCAB, SLOTS = 32, 64, 48, 3
ENGINE_IDS = EngineIds(engine="sglang", version="0.5.23", model_class="LlamaForCausalLM", ids=(1, 3, 5))
CAPTURE = CaptureSpec(aux=("layers.1", "layers.3", "layers.5"))


def make_config(**overrides: object) -> DrafterConfig:
    shape = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "num_slots": SLOTS,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "draft_vocab_size": DRAFT_VOCAB,
        "target_vocab_size": VOCAB,
        "max_positions": 256,
    }
    return DrafterConfig.model_validate(shape | overrides)


def make_drafter(seed: int = 0, norm: NormFlags | None = None, **overrides: object) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(make_config(norm=norm or NormFlags(), **overrides))
    draw_weights(drafter)
    return drafter


@torch.no_grad()
def draw_weights(drafter: Drafter) -> None:
    """Random weights, norms included: a norm of ones would hide a norm left out."""
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
        else:
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))


def make_vocab(seed: int = 0) -> VocabMap:
    generator = torch.Generator().manual_seed(seed)
    return VocabMap(torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values, VOCAB)


def make_contract(drafter: Drafter, vocab: VocabMap) -> DrafterContract:
    return contract_for(
        drafter,
        vocab,
        capture=CAPTURE,
        target=TargetIdentity(
            name="made-up",
            model_class="LlamaForCausalLM",
            num_layers=8,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            config_sha256="a" * 64,
            weights_sha256="b" * 64,
        ),
        tokenizer=TokenizerIdentity(sha256="c" * 64),
        dump=DumpRef(uri="s3://eagle3/dumps/made-up", sha256="d" * 64),
        report_sha256="e" * 64,
    )


def make_sample(num_rows: int, prompt: int, seed: int = 0) -> TrainingSample:
    """Random states and tokens; the answer starts at token `prompt`."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(num_rows + 1) >= prompt
    return TrainingSample(
        id=f"sample-{seed}",
        input_ids=torch.randint(VOCAB, (num_rows + 1,), generator=generator),
        aux=torch.randn(num_rows, SLOTS * HIDDEN, generator=generator),
        final=torch.randn(num_rows, HIDDEN, generator=generator),
        loss_mask=mask,
    )


def make_parts(seed: int = 0) -> TargetParts:
    generator = torch.Generator().manual_seed(seed)
    return TargetParts(
        embedding=torch.randn(VOCAB, HIDDEN, generator=generator),
        head=torch.randn(VOCAB, HIDDEN, generator=generator),
        final_norm=1 + 0.3 * torch.randn(HIDDEN, generator=generator),
        rms_norm_eps=1e-5,
        num_layers=8,
    )


@dataclass(frozen=True)
class LearnableDump:
    parts: TargetParts
    vocab: VocabMap
    train: list[TrainingSample]
    heldout: list[TrainingSample]


def make_learnable_dump(seed: int = 0, num_train: int = 96, num_heldout: int = 16) -> LearnableDump:
    """Text without any pattern, whose states give the next tokens away: only the states can be learnt from.

    At row p the slots hold codes of tokens p+1, p+2 and p+3, each in a code of its own, so slots in another order say
    something else. The final state leads the head to the next token: the text is the target's own greedy text.
    """
    generator = torch.Generator().manual_seed(seed)
    parts, vocab = make_parts(seed), make_vocab(seed)
    codes = torch.randn(SLOTS, VOCAB, HIDDEN, generator=generator)

    def sample(number: int) -> TrainingSample:
        rows = int(torch.randint(24, 40, (1,), generator=generator))
        text = vocab.target_ids[torch.randint(DRAFT_VOCAB, (rows + SLOTS,), generator=generator)]
        slots = [codes[i][text[1 + i : 1 + i + rows]] for i in range(SLOTS)]  # slot i of row p: token p + 1 + i
        aux = torch.cat(slots, dim=-1)
        return TrainingSample(
            id=f"text-{number}",
            input_ids=text[: rows + 1],
            aux=aux + 0.1 * torch.randn(aux.shape, generator=generator),
            final=0.5 * parts.head[text[1 : rows + 1]],
            loss_mask=torch.arange(rows + 1) >= 6,
        )

    samples = [sample(i) for i in range(num_train + num_heldout)]
    return LearnableDump(parts, vocab, samples[:num_train], samples[num_train:])


def roll_slots(sample: TrainingSample) -> TrainingSample:
    """The same sample with every slot in another's place: the first is last."""
    aux: Tensor = sample.aux.roll(-HIDDEN, dims=-1)
    return TrainingSample(sample.id, sample.input_ids, aux, sample.final, sample.loss_mask)
