"""Losses that compare answers, beside TRL's own: the same tokens through the losses of its trainers, which pad them,
and through ours, packed behind shared prompts. Both are in float32."""

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

from llmtrain.data import tokenizer as tok
from llmtrain.data.loader import Collate, SlotRows
from llmtrain.data.samplers import Slot
from llmtrain.interfaces.batches import Batch
from llmtrain.models.config import ModelConfig
from llmtrain.models.preference_config import PreferenceConfig
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.placement import place
from tests.engines import engine_of
from tests.families import OVERRIDES
from tests.launching import long_form
from tests.pair_rows import write_pair_rows

pytestmark = [
    long_form,
    # TRL's trainers call transformers by names that it is about to drop.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BLOCK, END, COUNT = (
    48,
    0,
    6,
)  # tokens of an answer with its prompt; the tokenizer's end of text; pairs
DEFAULT, CPO, ORPO = "trl", "trl.experimental.cpo", "trl.experimental.orpo"
TRAINERS = {  # of each loss: where it is, and the flags that both sides have
    "sigmoid": (DEFAULT, "DPO", {"beta": 0.3}),
    "robust": (DEFAULT, "DPO", {"beta": 0.3, "label_smoothing": 0.2}),
    "ipo": (DEFAULT, "DPO", {"beta": 0.3}),
    "kto": (DEFAULT, "KTO", {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}),
    "orpo": (ORPO, "ORPO", {"beta": 0.3}),
    "simpo": (CPO, "CPO", {"beta": 2.0, "simpo_gamma": 0.8, "label_smoothing": 0.1}),
    "reward": (DEFAULT, "Reward", {}),
    "sigmoid_norm": (DEFAULT, "DPO", {}),
    "hinge": (DEFAULT, "DPO", {}),
    "exo_pair": (DEFAULT, "DPO", {"label_smoothing": 1e-3}),
    "nca_pair": (DEFAULT, "DPO", {}),
    "bco_pair": (DEFAULT, "DPO", {}),
    "sppo_hard": (DEFAULT, "DPO", {}),
    "aot": (DEFAULT, "DPO", {"label_smoothing": 0.2}),
    "aot_unpaired": (DEFAULT, "DPO", {"label_smoothing": 0.2}),
    "apo_zero": (DEFAULT, "DPO", {}),
    "apo_down": (DEFAULT, "DPO", {}),
    # A smaller tau multiplies the rounding errors of the log-probabilities.
    "discopop": (DEFAULT, "DPO", {"discopop_tau": 0.5}),
    "sft": (DEFAULT, "DPO", {}),
    "apo_zero_unpaired": (DEFAULT, "KTO", {"desirable_weight": 1.3, "undesirable_weight": 0.7}),
}


class Pair(NamedTuple):
    """A prompt and two answers to it; of an answer that is judged alone, the second is another prompt's."""

    prompt: list[int]
    first: list[int]
    second: list[int]
    desirable: bool = True


def ragged(loss: str) -> list[Pair]:
    """Pairs of many lengths; of answers that are judged alone as TRL mixes them, the last one's to the first prompt."""
    draw = np.random.default_rng(0)

    def tokens(least: int, most: int) -> list[int]:
        return draw.integers(1, 250, draw.integers(least, most)).tolist()

    pairs = [
        Pair(tokens(2, 20), [*tokens(1, 24), END], [*tokens(1, 24), END]) for _ in range(COUNT)
    ]
    if loss not in ("kto", "apo_zero_unpaired"):
        return pairs
    return [
        Pair(one.prompt, one.first, pairs[i - 1].first, i % 3 > 0) for i, one in enumerate(pairs)
    ]


class Ours:
    """Our model after a few steps in some direction, and the pairs in rows, with the numbers of its first weights."""

    def __init__(self, loss: str, folder: Path, accelerator: Any, words: Any, **flags: Any) -> None:
        self.pairs = ragged(loss)
        preference = PreferenceConfig(loss_type=[loss], **flags)
        rows, written = write_pair_rows(
            folder / "rows.arrow", self.pairs, width=2 * BLOCK, share_prompts=True
        )
        assert 1 < len(rows) < COUNT, "several rows, and several pairs in one of them"
        facts = SimpleNamespace(dataset="pairs", pairs=written.pairs, shared=True)
        stand_in: Any = SimpleNamespace(
            tokenizer=words, stop_token_ids=(), new_tokens=[], metadata=facts, is_packed=True
        )
        config = ModelConfig(from_config="llama", config_overrides=OVERRIDES, max_length=BLOCK)
        bundle = place(
            accelerator, load_model(config, None, stand_in, 3, "no", preference=preference)
        )
        self.objective: Any = bundle.objective
        self.model: Any = bundle.model.train()
        self.engine = engine_of(accelerator, self.model, self.objective)
        slots = [Slot(i, i) for i in range(len(rows))]
        collate = Collate(len(rows), prepare=bundle.prepare_batch)
        (batch,) = collate(SlotRows(rows).__getitems__(slots)).batches
        self.first = self.theirs()

        log_probabilities = self.engine.call_in_forward(self.objective.reference, batch)
        self.batch: Batch = batch | {"reference": log_probabilities.detach()}
        torch.manual_seed(0)
        # This direction makes the baseline of kto larger than zero.
        likelier = gradients(self.model, log_probabilities.sum())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.add_(
                    0.2 * parameter.std() * torch.randn_like(parameter) + 2e-4 * likelier[name]
                )

    def theirs(self) -> Any:
        """Transformers' own model with the weights of now."""
        config = copy.deepcopy(self.model.config)
        config._attn_implementation = "sdpa"
        model = self.model.own_class(config)
        model.load_state_dict(self.model.state_dict())
        return model

    def loss(self) -> Tensor:
        totals = self.engine.count([self.batch])
        extra = self.objective.prepass(self.engine, [self.batch], totals)
        assert extra.get("kl_baseline", 1) > 0.1, "a baseline to compare with"
        return self.engine.loss(self.batch, extra).loss / totals.denominator


class Theirs:
    """A trainer of TRL's with transformers' own model, and the pairs as its own collator makes a batch of them."""

    def __init__(
        self, loss: str, ours: Ours, words: Any, folder: Path, pad: str = "!", **flags: Any
    ) -> None:
        datasets = importlib.import_module("datasets")
        home, name, _ = TRAINERS[loss]
        package, self.words = importlib.import_module(home), copy.deepcopy(words)
        self.words.pad_token = pad
        more: dict[str, Any] = {
            "DPO": {"loss_type": [loss]},
            "KTO": {"loss_type": loss},
            "CPO": {"loss_type": loss, "cpo_alpha": 0.0},
        }.get(name, {})
        settings = getattr(package, f"{name}Config")(
            output_dir=str(folder),
            per_device_train_batch_size=COUNT,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **more,
            **flags,
        )
        record = (
            {"prompt": "a", "completion": "b", "label": True}
            if name == "KTO"
            else dict(zip(("prompt", "chosen", "rejected"), "abc", strict=True))
        )
        self.model = ours.theirs()
        compared = {"ref_model": copy.deepcopy(ours.first)} if name in ("DPO", "KTO") else {}
        self.trainer = getattr(package, f"{name}Trainer")(
            model=self.model,
            args=settings,
            train_dataset=datasets.Dataset.from_list([record] * 2),  # which a trainer must have
            processing_class=self.words,
            **compared,
        )
        self.model.train()
        self.name = name
        self.batch = self.batch_of(ours.pairs)

    def batch_of(self, pairs: list[Pair]) -> Any:
        """The pairs in the fields that the trainer's collator takes."""
        return self.trainer.data_collator([self._fields(pair) for pair in pairs])

    def _fields(self, pair: Pair) -> dict[str, Any]:
        prompt, first, second, desirable = pair
        if self.name == "DPO":
            return {"prompt_ids": prompt, "chosen_ids": first, "rejected_ids": second}
        if self.name == "KTO":
            alone = {"prompt_ids": prompt, "completion_ids": first, "label": desirable}
            return alone | {"KL_completion_ids": second}
        if self.name == "Reward":
            return {"chosen_ids": prompt + first, "rejected_ids": prompt + second}
        found: dict[str, Any] = {}
        for which, answer in (("chosen", first), ("rejected", second)):
            found[f"{which}_input_ids"] = prompt + answer
            found[f"{which}_attention_mask"] = [1] * len(prompt + answer)
            found[f"{which}_labels"] = [-100] * len(prompt) + answer
        return found

    def loss(self, batch: Any = None) -> Tensor:
        found: Tensor = self.trainer.compute_loss(
            self.model, dict(self.batch if batch is None else batch)
        )
        return found


@pytest.fixture(scope="module")
def words() -> Any:
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)


@pytest.fixture
def sides(words: Any, accelerator: Any, tmp_path: Path) -> Callable[..., tuple[Ours, Theirs]]:
    """Both sides of a loss, with the flags of the table or others."""
    pytest.importorskip("trl", reason="needs trl, which comes with the extra dev")

    def sides(loss: str, pad: str = "!", **flags: Any) -> tuple[Ours, Theirs]:
        flags = TRAINERS[loss][2] | flags
        ours = Ours(loss, tmp_path, accelerator, words, **flags)
        return ours, Theirs(loss, ours, words, tmp_path / "trl", pad, **flags)

    return sides


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_same(ours: Ours, our_loss: Tensor, theirs: Theirs, their_loss: Tensor) -> str:
    """One loss, and one gradient of every parameter; returns how far they are apart."""
    mine, other = gradients(ours.model, our_loss), gradients(theirs.model, their_loss)
    assert mine.keys() == other.keys()
    assert all(gradient.abs().max() > 0 for gradient in other.values()), (
        "there is something to compare in each"
    )
    flat, wanted = (
        torch.cat([one.flatten() for one in each.values()]).double() for each in (mine, other)
    )
    loss = abs(our_loss.item() / their_loss.item() - 1)
    norm = abs(float(flat.norm() / wanted.norm()) - 1)
    apart = float((flat - wanted).norm() / wanted.norm())
    worst = max(float((mine[name] - g).norm() / g.norm()) for name, g in other.items())
    said = f"loss {loss:.1e}, gradient's norm {norm:.1e}, gradient {apart:.1e}, of one parameter at most {worst:.1e}"
    assert loss < 1e-5, said
    assert norm < 1e-5, said
    assert apart < 1e-5, said
    assert worst < 1e-4, said
    return said


def mean_nll(batch: Any, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Of the chosen answers: the mean nll of all their tokens, prompts too; and of each the mean of its own."""
    ids, mask, labels = (
        batch[f"chosen_{name}"] for name in ("input_ids", "attention_mask", "labels")
    )
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    nll = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    real, judged = mask[:, 1:], labels[:, 1:] >= 0
    return (nll * real).sum() / real.sum(), (nll * judged).sum(1) / judged.sum(1)


@pytest.mark.parametrize("loss", [loss for loss in TRAINERS if loss != "orpo"])
def test_a_loss_and_its_gradients_are_those_of_trls_trainer(loss: str, sides, score) -> None:
    ours, theirs = sides(loss)
    said = assert_same(ours, ours.loss(), theirs, theirs.loss())
    score(f"preferences: {loss} beside TRL's: {said}")


def test_orpo_has_trls_odds_and_the_nll_of_the_answer_where_trl_has_that_of_all_tokens(
    sides, score
) -> None:
    ours, theirs = sides("orpo")
    whole, answers = mean_nll(theirs.batch, theirs.model)
    their_nll = theirs.trainer.concatenated_forward(theirs.model, theirs.batch)[4].detach()
    assert float(their_nll) == pytest.approx(float(whole), rel=1e-6)
    assert abs(float(whole - answers.mean())) > 1e-4, "they are not the same"
    assert float(theirs.loss()) != pytest.approx(float(ours.loss()), abs=1e-4)
    said = assert_same(ours, ours.loss(), theirs, theirs.loss() - whole + answers.mean())
    score(f"preferences: orpo beside TRL's, with another nll: {said}")


def test_smoothed_sigmoid_counts_some_pairs_the_other_way_round_and_trl_ignores_the_flag(
    sides,
) -> None:
    ours, theirs = sides("sigmoid", label_smoothing=0.2)
    plain = theirs.loss()
    theirs.trainer.label_smoothing = 0.0
    assert torch.equal(plain, theirs.loss())
    assert float(ours.loss()) != pytest.approx(float(plain), abs=1e-3)
    turned = theirs.loss(
        theirs.batch_of([Pair(one.prompt, one.second, one.first) for one in ours.pairs])
    )
    assert_same(ours, ours.loss(), theirs, 0.8 * plain + 0.2 * turned)


def test_a_score_is_read_at_the_end_token_which_trl_passes_over_where_it_pads_with_that(
    sides,
) -> None:
    ours, theirs = sides("reward", pad="<|endoftext|>")
    assert float(theirs.loss()) != pytest.approx(float(ours.loss()), rel=1e-4)
    mask = theirs.batch["attention_mask"]
    hidden = theirs.model.model(
        input_ids=theirs.batch["input_ids"], attention_mask=mask
    ).last_hidden_state
    scores = theirs.model.score(hidden)[..., 0]
    for back, loss in ((1, ours.loss()), (2, theirs.loss())):
        first, second = scores.gather(1, mask.sum(1, keepdim=True) - back)[:, 0].chunk(2)
        assert float(-F.logsigmoid(first - second).mean()) == pytest.approx(float(loss), rel=1e-5)
