"""Preference losses and gradients are those of TRL's trainers, in float32.

The trainers pad the same tokens that this package packs behind shared prompts.
"""

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llmtrain as lt
from llmtrain.data.loader import LocalBatches
from llmtrain.data.order import Slot
from llmtrain.interfaces.batches import IGNORED, Batch
from tests.engines import engine_of
from tests.families import OVERRIDES
from tests.launching import long_form
from tests.models.small_models import byte_tokenizer
from tests.pair_rows import write_pair_rows

# TRL's trainers call transformers by names that it is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

MAX_LENGTH = 48  # of a prompt with an answer
END_OF_TEXT = 0
PAIRS = 6

# The module of each trainer.
TRAINERS = {
    "DPO": "trl",
    "KTO": "trl",
    "Reward": "trl",
    "CPO": "trl.experimental.cpo",
    "ORPO": "trl.experimental.orpo",
}

# The trainer of each loss, and the parameters that both sides get.
LOSSES: dict[str, tuple[str, dict[str, float]]] = {
    "sigmoid": ("DPO", {"beta": 0.3}),
    "robust": ("DPO", {"beta": 0.3, "label_smoothing": 0.2}),
    "ipo": ("DPO", {"beta": 0.3}),
    "kto": ("KTO", {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}),
    "orpo": ("ORPO", {"beta": 0.3}),
    "simpo": ("CPO", {"beta": 2.0, "simpo_gamma": 0.8, "label_smoothing": 0.1}),
    "reward": ("Reward", {}),
    "sigmoid_norm": ("DPO", {}),
    "hinge": ("DPO", {}),
    "apo_zero": ("DPO", {}),
    "apo_down": ("DPO", {}),
    "sft": ("DPO", {}),
    "apo_zero_unpaired": ("KTO", {"desirable_weight": 1.3, "undesirable_weight": 0.7}),
}
UNPAIRED = ("kto", "apo_zero_unpaired")


class Pair(NamedTuple):
    """A prompt with two answers.

    Of unpaired answers, the second one is the answer to another prompt: KTO's baseline needs it.
    """

    prompt: list[int]
    first: list[int]
    second: list[int]
    is_first_desirable: bool = True


def random_pairs(loss: str) -> list[Pair]:
    """Return pairs of many lengths, in the order in which TRL makes batches of them."""
    generator = np.random.default_rng(0)

    def tokens(shortest: int, limit: int) -> list[int]:
        return generator.integers(1, 250, generator.integers(shortest, limit)).tolist()

    pairs = []
    for _ in range(PAIRS):
        prompt = tokens(2, 20)
        first = [*tokens(1, 24), END_OF_TEXT]
        second = [*tokens(1, 24), END_OF_TEXT]
        pairs.append(Pair(prompt, first, second))
    if loss not in UNPAIRED:
        return pairs

    # TRL takes the baseline's answers from the batch, one place further.
    return [
        Pair(pair.prompt, pair.first, pairs[number - 1].first, is_first_desirable=number % 3 > 0)
        for number, pair in enumerate(pairs)
    ]


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True))


class PackedSide:
    """The loss of this package: pairs in packed rows, and a model some way from its reference.

    Attributes:
        pairs: the pairs.
        model: the model.
        reference_model: transformers' own model with the initial weights.
    """

    def __init__(
        self, loss: str, folder: Path, load: Any, accelerator: Any, **parameters: Any
    ) -> None:
        self.pairs = random_pairs(loss)
        rows, written = write_pair_rows(
            folder / "rows.safetensors", self.pairs, width=2 * MAX_LENGTH, share_prompts=True
        )
        assert 1 < len(rows) < PAIRS, "there are several rows, and several pairs in some of them"

        config = lt.ModelConfig(
            from_config="llama", config_overrides=OVERRIDES, max_length=MAX_LENGTH
        )
        bundle = load(
            config,
            packed=True,
            metadata=SimpleNamespace(dataset="pairs", pairs=written.pairs, shared=True),
            preference=lt.PreferenceConfig(loss_type=[loss], **parameters),
        )
        self.objective: Any = bundle.objective
        self.model: Any = bundle.model.train()
        self.engine = engine_of(accelerator, self.model, self.objective)
        self.reference_model = self.transformers_model()

        slots = [Slot(i, i) for i in range(len(rows))]
        batches = LocalBatches(rows, len(rows), prepare=bundle.prepare_batch)
        (batch,) = batches.__getitems__(slots).batches
        log_probabilities = self.engine.call_in_forward(self.objective.reference, batch)
        self.batch: Batch = batch | {"reference": log_probabilities.detach()}
        self._move_from_reference(log_probabilities.sum())

    def _move_from_reference(self, log_probability: Tensor) -> None:
        """Change the weights so that answers become likelier, which raises KTO's baseline."""
        torch.manual_seed(0)
        direction = gradients_of(self.model, log_probability)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                noise = 0.2 * parameter.std() * torch.randn_like(parameter)
                parameter.add_(noise + 2e-4 * direction[name])

    def transformers_model(self) -> Any:
        """Return transformers' own model with the current weights."""
        config = copy.deepcopy(self.model.config)
        config._attn_implementation = "sdpa"
        model = self.model.own_class(config)
        model.load_state_dict(self.model.state_dict())
        return model

    def loss(self) -> Tensor:
        totals = self.engine.count([self.batch])
        extra = self.objective.prepass(self.engine, [self.batch], totals)
        assert extra.get("kl_baseline", 1) > 0.1, "there is a baseline to compare"
        return self.engine.loss(self.batch, extra).loss / totals.denominator


class TrlSide:
    """The loss of one of TRL's trainers: its collator pads the same pairs, for the same weights."""

    def __init__(
        self,
        loss: str,
        packed: PackedSide,
        folder: Path,
        pad_token: str = "!",
        **parameters: Any,
    ) -> None:
        self.trainer_name, _ = LOSSES[loss]
        module = importlib.import_module(TRAINERS[self.trainer_name])
        trainer_class = getattr(module, f"{self.trainer_name}Trainer")
        config_class = getattr(module, f"{self.trainer_name}Config")
        loss_options: dict[str, dict[str, Any]] = {
            "DPO": {"loss_type": [loss]},
            "KTO": {"loss_type": loss},
            "CPO": {"loss_type": loss, "cpo_alpha": 0.0},
        }
        settings = config_class(
            output_dir=str(folder),
            per_device_train_batch_size=PAIRS,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **loss_options.get(self.trainer_name, {}),
            **parameters,
        )
        reference = {}
        if self.trainer_name in ("DPO", "KTO"):
            reference["ref_model"] = copy.deepcopy(packed.reference_model)
        tokenizer = byte_tokenizer()
        tokenizer.pad_token = pad_token
        self.model = packed.transformers_model()
        self.trainer = trainer_class(
            model=self.model,
            args=settings,
            train_dataset=self._required_dataset(),
            processing_class=tokenizer,
            **reference,
        )
        self.model.train()
        self.batch = self.batch_of(packed.pairs)

    def _required_dataset(self) -> Any:
        """Return a data set, which a trainer must have. It is not used."""
        datasets = importlib.import_module("datasets")
        record: dict[str, Any] = {"prompt": "a", "chosen": "b", "rejected": "c"}
        if self.trainer_name == "KTO":
            record = {"prompt": "a", "completion": "b", "label": True}
        return datasets.Dataset.from_list([record, record])

    def batch_of(self, pairs: list[Pair]) -> dict[str, Tensor]:
        return self.trainer.data_collator([self._fields(pair) for pair in pairs])

    def _fields(self, pair: Pair) -> dict[str, Any]:
        """Return a pair in the fields that the trainer's collator takes."""
        if self.trainer_name == "DPO":
            return {
                "prompt_ids": pair.prompt,
                "chosen_ids": pair.first,
                "rejected_ids": pair.second,
            }
        if self.trainer_name == "KTO":
            return {
                "prompt_ids": pair.prompt,
                "completion_ids": pair.first,
                "label": pair.is_first_desirable,
                "KL_completion_ids": pair.second,
            }
        if self.trainer_name == "Reward":
            return {
                "chosen_ids": pair.prompt + pair.first,
                "rejected_ids": pair.prompt + pair.second,
            }
        fields: dict[str, Any] = {}
        for name, answer in {"chosen": pair.first, "rejected": pair.second}.items():
            ids = pair.prompt + answer
            fields[f"{name}_input_ids"] = ids
            fields[f"{name}_attention_mask"] = [1] * len(ids)
            fields[f"{name}_labels"] = [IGNORED] * len(pair.prompt) + answer
        return fields

    def loss(self) -> Tensor:
        return self.loss_of(self.batch)

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.trainer.compute_loss(self.model, dict(batch))
        return loss


@pytest.fixture
def make_sides(
    load: Any, accelerator: Any, tmp_path: Path
) -> Callable[..., tuple[PackedSide, TrlSide]]:
    """Return both sides of a loss, with the parameters of the table or others."""
    pytest.importorskip("trl", reason="needs trl, which comes with the extra dev")

    def make_sides(loss: str, pad_token: str = "!", **changes: Any) -> tuple[PackedSide, TrlSide]:
        _, defaults = LOSSES[loss]
        parameters = defaults | changes
        packed = PackedSide(loss, tmp_path, load, accelerator, **parameters)
        return packed, TrlSide(loss, packed, tmp_path / "trl", pad_token, **parameters)

    return make_sides


def check_same(packed: PackedSide, loss: Tensor, trl: TrlSide, trl_loss: Tensor) -> str:
    """Check the loss and the gradient of every parameter, and return the differences in words."""
    gradients = gradients_of(packed.model, loss)
    expected = gradients_of(trl.model, trl_loss)
    assert gradients.keys() == expected.keys()
    assert all(gradient.any() for gradient in expected.values()), "there is nothing to compare"

    flat = torch.cat([gradient.flatten() for gradient in gradients.values()]).double()
    expected_flat = torch.cat([gradient.flatten() for gradient in expected.values()]).double()
    errors_of_parameters = [
        float((gradients[name] - gradient).norm() / gradient.norm())
        for name, gradient in expected.items()
    ]
    errors = {
        "loss": abs(loss.item() / trl_loss.item() - 1),
        "gradient": float((flat - expected_flat).norm() / expected_flat.norm()),
        "gradient of one parameter at most": max(errors_of_parameters),
    }
    description = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    # One by one, because `max` may hide NaN.
    assert all(error < 1e-4 for error in errors_of_parameters), description
    assert errors["loss"] < 1e-5, description
    assert errors["gradient"] < 1e-5, description
    return description


# The nll term of ORPO differs, as below. The loss of DPO is compared in `make test`, too.
@pytest.mark.parametrize(
    "loss",
    [
        "sigmoid",
        *(
            pytest.param(loss, marks=long_form)
            for loss in LOSSES
            if loss not in ("sigmoid", "orpo")
        ),
    ],
)
def test_a_loss_and_its_gradients_are_those_of_the_trainer(loss: str, make_sides, score) -> None:
    packed, trl = make_sides(loss)
    differences = check_same(packed, packed.loss(), trl, trl.loss())
    score(f"preferences: {loss} beside TRL's: {differences}")


# --- documented differences, in docs/guides/preferences.md


def mean_nll_of_all_tokens(trl: TrlSide) -> Tensor:
    """Return the mean nll over all tokens of the chosen answers and their prompts."""
    is_token = trl.batch["chosen_attention_mask"][:, 1:]
    return (chosen_nll(trl) * is_token).sum() / is_token.sum()


def mean_nll_of_answers(trl: TrlSide) -> Tensor:
    """Return the mean nll over the tokens of each chosen answer, and its mean over the answers."""
    is_target = trl.batch["chosen_labels"][:, 1:] >= 0
    return ((chosen_nll(trl) * is_target).sum(1) / is_target.sum(1)).mean()


def chosen_nll(trl: TrlSide) -> Tensor:
    """Return the nll of each token of the chosen answers and their prompts [pairs, T - 1]."""
    ids = trl.batch["chosen_input_ids"]
    logits = trl.model(input_ids=ids, attention_mask=trl.batch["chosen_attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


@long_form
def test_the_nll_term_of_orpo_is_of_the_answer_and_in_trl_of_the_prompt_too(
    make_sides, score
) -> None:
    packed, trl = make_sides("orpo")
    nll_of_all_tokens = mean_nll_of_all_tokens(trl)
    nll_of_answers = mean_nll_of_answers(trl)

    nll_of_trl = trl.trainer.concatenated_forward(trl.model, trl.batch)[4]
    assert nll_of_trl.item() == pytest.approx(nll_of_all_tokens.item(), rel=1e-6)
    assert abs(nll_of_all_tokens - nll_of_answers) > 1e-4
    assert trl.loss().item() != pytest.approx(packed.loss().item(), abs=1e-4)

    expected = trl.loss() - nll_of_all_tokens + nll_of_answers
    differences = check_same(packed, packed.loss(), trl, expected)
    score(f"preferences: orpo beside TRL's, with another nll: {differences}")


@long_form
def test_label_smoothing_of_sigmoid_swaps_a_share_of_pairs_and_trl_ignores_it(make_sides) -> None:
    packed, trl = make_sides("sigmoid", label_smoothing=0.2)
    loss = trl.loss()
    trl.trainer.label_smoothing = 0.0
    assert torch.equal(trl.loss(), loss)
    assert packed.loss().item() != pytest.approx(loss.item(), abs=1e-3)

    swapped_pairs = [Pair(pair.prompt, pair.second, pair.first) for pair in packed.pairs]
    swapped_loss = trl.loss_of(trl.batch_of(swapped_pairs))
    check_same(packed, packed.loss(), trl, 0.8 * loss + 0.2 * swapped_loss)


@long_form
def test_a_score_is_read_at_the_end_token_even_if_it_is_the_padding_token(make_sides) -> None:
    """TRL then reads it one token earlier."""
    packed, trl = make_sides("reward", pad_token="<|endoftext|>")
    assert trl.loss().item() != pytest.approx(packed.loss().item(), rel=1e-4)

    mask = trl.batch["attention_mask"]
    output = trl.model.model(input_ids=trl.batch["input_ids"], attention_mask=mask)
    scores = trl.model.score(output.last_hidden_state)[..., 0]
    lengths = mask.sum(1, keepdim=True)

    def loss_of_scores_at(positions: Tensor) -> float:
        chosen, rejected = scores.gather(1, positions)[:, 0].chunk(2)
        return float(-F.logsigmoid(chosen - rejected).mean())

    at_end_token = loss_of_scores_at(lengths - 1)
    before_end_token = loss_of_scores_at(lengths - 2)
    assert packed.loss().item() == pytest.approx(at_end_token, rel=1e-5)
    assert trl.loss().item() == pytest.approx(before_end_token, rel=1e-5)
