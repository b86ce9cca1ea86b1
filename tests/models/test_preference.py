"""Preference losses: each is its formula on any layout of the pairs in rows, for any family."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import AutoPeftModelForSequenceClassification
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.models.llama import modeling_llama

import llmtrain as lt
from llmtrain.data.loader import LocalBatches
from llmtrain.data.order import Slot
from llmtrain.data.shards import TokenRows
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch, answer_of, pair_of
from llmtrain.models import attention_cpu
from llmtrain.models.adapters import write_merged
from llmtrain.models.attention import ATTENTION_NAME
from llmtrain.models.generation import TextModel
from llmtrain.models.preference import orpo
from llmtrain.parallel.engine import add_sums
from recipes import preference
from tests.engines import engine_of
from tests.families import OVERRIDES
from tests.models.small_models import export_model
from tests.pair_rows import TokenPair, write_pair_rows
from tests.trl_losses import trl_dpo_loss, trl_kto_loss

MAX_LENGTH = 32

# How the pairs are laid out in rows. Unpacked, each row has one pair.
LAYOUTS = {
    "shared prompts": {"share_prompts": True, "packing": True},
    "separate prompts": {"share_prompts": False, "packing": True},
    "unpacked": {"share_prompts": False, "packing": False},
}

OTHER_LAYOUTS = ["separate prompts", "unpacked"]

# The losses that are compared with a formula below, with their parameters.
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid, smoothed": {"label_smoothing": 0.2},
    "kto": {"desirable_weight": 1.3, "undesirable_weight": 0.7},
    "orpo": {},
    "simpo": {"beta": 2.0, "label_smoothing": 0.1},
    "reward": {},
}

# The losses that are compared with TRL's code, with their parameters.
LIKE_TRL: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "robust": {"label_smoothing": 0.2},
    "ipo": {},
    "sigmoid_norm": {"beta": 2.0},
    "hinge": {"beta": 0.05},
    "apo_zero": {},
    "apo_down": {},
    "sft": {},
    "apo_zero_unpaired": {"desirable_weight": 1.3, "undesirable_weight": 0.7},
    "a sum": {"loss_type": ["sigmoid", "apo_zero", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
}


def config_of(loss: str) -> lt.PreferenceConfig:
    parameters = LOSSES.get(loss, LIKE_TRL.get(loss))
    assert parameters is not None, loss
    return lt.PreferenceConfig(**{"loss_type": [loss.partition(",")[0]]} | parameters)


# --- pairs, and their rows


@dataclass
class WrittenPairs:
    """Preference pairs in rows.

    Attributes:
        pairs: each a prompt, two answers, and whether the first answer is desirable.
        rows: the rows.
        pairs_per_row: the largest number of pairs in a row.
        share_prompts: whether the answers of a pair share one copy of their prompt.
    """

    pairs: list[TokenPair]
    rows: TokenRows
    pairs_per_row: int
    share_prompts: bool

    def by_pair(self, values: Tensor) -> Tensor:
        """Sort values of answers by pair: [rows, answers of a row] -> [pairs, 2]."""
        values_of_pairs: list[Tensor | None] = [None] * len(self.pairs)
        for row in range(len(self.rows)):
            codes = np.array(self.rows[row]["answers"])
            labels = np.array(self.rows[row]["labels"])
            for index in range(pair_of(codes.max()) + 1):
                is_target = (answer_of(codes) == 2 * index) & (labels >= 0)
                number = self._number_of(first_answer=labels[is_target].tolist())
                assert values_of_pairs[number] is None, "a pair is in the rows once"
                values_of_pairs[number] = values[row, 2 * index : 2 * index + 2]
        return torch.stack([value for value in values_of_pairs if value is not None])

    def _number_of(self, first_answer: list[int]) -> int:
        (number,) = [i for i, pair in enumerate(self.pairs) if pair[1] == first_answer]
        return number

    def with_reference(self, reference: Tensor) -> "WrittenPairs":
        """Add log-probabilities of a reference model [rows, answers of a row], in float64."""
        rows = self.rows.with_column("reference", reference.double().numpy())
        return WrittenPairs(self.pairs, rows, self.pairs_per_row, self.share_prompts)


def random_pairs(count: int = 9) -> list[TokenPair]:
    generator = np.random.default_rng(0)

    def tokens(limit: int) -> list[int]:
        length = generator.integers(1, limit)
        return generator.integers(1, 250, length).tolist()

    return [(tokens(18), tokens(14), tokens(14), bool(generator.integers(2))) for _ in range(count)]


def write_pairs(
    folder: Path, pairs: list[TokenPair], layout: str = "shared prompts"
) -> WrittenPairs:
    path = folder / f"{layout}.safetensors"
    rows, written = write_pair_rows(path, pairs, width=2 * MAX_LENGTH, **LAYOUTS[layout])
    return WrittenPairs(
        pairs=pairs,
        rows=rows,
        pairs_per_row=written.pairs,
        share_prompts=LAYOUTS[layout]["share_prompts"],
    )


def micro_batches(written: WrittenPairs, bundle: lt.ModelBundle, rows_each: int) -> list[Batch]:
    """Return micro-batches of all rows, with padding up to a multiple of four rows."""
    count = len(written.rows)
    slots = [Slot(i, i) for i in range(count)]
    slots += [Slot(i, None) for i in range(count, 4 * math.ceil(count / 4))]
    batches = LocalBatches(written.rows, rows_each, prepare=bundle.prepare_batch)
    return batches.__getitems__(slots).batches


def answer_values(written: WrittenPairs, bundle: lt.ModelBundle, rows_each: int = 2) -> Tensor:
    """Return the log-probability, or the score, of each answer [rows, answers of a row]."""
    values = [
        bundle.model(**batch, compute=bundle.objective.reference)
        for batch in micro_batches(written, bundle, rows_each)
    ]
    return torch.cat(values).detach()


@pytest.fixture
def load(load) -> Callable[..., lt.ModelBundle]:
    """Load a small model for pairs in rows, as a run does."""

    def load_for_pairs(
        written: WrittenPairs,
        family: str | None = "llama",
        loss: str = "sigmoid",
        lora: lt.LoraConfig | None = None,
        **flags: Any,
    ) -> lt.ModelBundle:
        if family is not None:
            flags.setdefault("config_overrides", OVERRIDES)
        config = lt.ModelConfig(from_config=family, max_length=MAX_LENGTH, **flags)
        return load(
            config,
            lora,
            packed="position_ids" in written.rows.column_names,
            metadata=SimpleNamespace(
                dataset="pairs", pairs=written.pairs_per_row, shared=written.share_prompts
            ),
            preference=config_of(loss),
        )

    return load_for_pairs


# --- the losses, computed from one answer at a time


def logistic_loss(margin: Tensor, label_smoothing: float = 0.0) -> Tensor:
    target = torch.full_like(margin, 1 - label_smoothing)
    return F.binary_cross_entropy_with_logits(margin, target)


def conservative_dpo_formula(answers: lt.Answers, config: lt.PreferenceConfig) -> Tensor:
    rewards = config.beta * (answers.logps - answers.reference)
    return logistic_loss(rewards[:, 0] - rewards[:, 1], config.label_smoothing)


def kto_formula(answers: lt.Answers, config: lt.PreferenceConfig) -> Tensor:
    """Equation 8 of arXiv:2402.01306. The baseline is estimated from the second answers."""
    log_ratios = answers.logps - answers.reference
    baseline = log_ratios[:, 1].mean().clamp(min=0).detach()
    above = config.beta * (log_ratios[:, 0] - baseline)
    if_desirable = config.desirable_weight * torch.sigmoid(-above)
    if_undesirable = config.undesirable_weight * torch.sigmoid(above)
    return torch.where(answers.desirable, if_desirable, if_undesirable).mean()


def orpo_formula(answers: lt.Answers, config: lt.PreferenceConfig) -> Tensor:
    """Equations 6 and 7 of arXiv:2403.07691."""
    mean_logps = answers.logps / answers.tokens
    log_odds = torch.logit(mean_logps.exp())
    odds_ratio_loss = logistic_loss(log_odds[:, 0] - log_odds[:, 1])
    return -mean_logps[:, 0].mean() + config.beta * odds_ratio_loss


def simpo_formula(answers: lt.Answers, config: lt.PreferenceConfig) -> Tensor:
    """Equation 6 of arXiv:2405.14734, with label smoothing."""
    rewards = config.beta * answers.logps / answers.tokens
    margin = rewards[:, 0] - rewards[:, 1] - config.simpo_gamma
    return logistic_loss(margin, config.label_smoothing)


def bradley_terry_formula(answers: lt.Answers, config: lt.PreferenceConfig) -> Tensor:
    return logistic_loss(answers.logps[:, 0] - answers.logps[:, 1])


FORMULAS = {
    "sigmoid, smoothed": conservative_dpo_formula,
    "kto": kto_formula,
    "orpo": orpo_formula,
    "simpo": simpo_formula,
    "reward": bradley_terry_formula,
}


def token_logps(model: nn.Module, prompt: list[int], answer: list[int]) -> Tensor:
    """Return the log-probability of each token of an answer, by transformers' own forward."""
    ids = torch.tensor([prompt + answer])
    logits = model.own_class.forward(model, input_ids=ids, use_cache=False).logits[0]
    log_probabilities = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=1)
    return log_probabilities[range(len(answer)), answer]


def score_of(model: nn.Module, prompt: list[int], answer: list[int]) -> Tensor:
    """Return the score of an answer, by transformers' own forward."""
    ids = torch.tensor([prompt + answer])
    own_class = getattr(model, "own_class", type(model))
    output = own_class.forward(model, input_ids=ids, attention_mask=torch.ones_like(ids))
    return output.logits[0, 0]


def expected_loss(model: nn.Module, pairs: list[TokenPair], reference: Tensor, loss: str) -> Tensor:
    """Return the mean loss over pairs, by TRL's code or by a formula.

    Args:
        model: the model.
        pairs: the pairs.
        reference: log-probabilities under the reference model [pairs, 2].
        loss: its name in LIKE_TRL or LOSSES.
    """
    config = config_of(loss)
    desirable = [is_first_desirable for _, _, _, is_first_desirable in pairs]
    if loss in LIKE_TRL and config.is_unpaired:
        answers = [token_logps(model, prompt, first) for prompt, first, _, _ in pairs]
        return trl_kto_loss(config, answers, reference[:, 0], desirable)
    if loss in LIKE_TRL:
        answers_of_pairs = [
            (token_logps(model, prompt, first), token_logps(model, prompt, second))
            for prompt, first, second, _ in pairs
        ]
        return trl_dpo_loss(config, answers_of_pairs, reference)

    values = []
    for prompt, *answers, _ in pairs:
        for answer in answers:
            if loss == "reward":
                values.append(score_of(model, prompt, answer))
            else:
                values.append(token_logps(model, prompt, answer).sum())
    lengths = [[len(first), len(second)] for _, first, second, _ in pairs]
    answer_values = lt.Answers(
        logps=torch.stack(values).view(-1, 2),  # or scores of a reward model
        tokens=torch.tensor(lengths),
        reference=reference,
        desirable=torch.tensor(desirable),
    )
    return FORMULAS[loss](answer_values, config)


@pytest.fixture
def norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the norms of llama compute in the dtype of the model. Their own compute in float32."""

    def forward(self: Any, hidden: Tensor) -> Tensor:
        mean_square = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden * torch.rsqrt(mean_square + self.variance_epsilon)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)


@pytest.mark.parametrize(
    ("family", "loss", "layout"),
    [
        *itertools.product(["llama"], [*LOSSES, *LIKE_TRL], ["shared prompts"]),
        # A baseline of all answers, means over tokens, a sum of losses, and scores.
        *itertools.product(["llama"], ["kto", "ipo", "a sum", "reward"], OTHER_LAYOUTS),
        *itertools.product(["gpt2"], ["sigmoid"], LAYOUTS),
    ],
)
def test_loss_and_gradients_are_the_formulas_in_any_rows_and_micro_batches(
    family: str,
    loss: str,
    layout: str,
    load,
    tmp_path: Path,
    norms_in_float64: None,
    accelerator,
) -> None:
    pairs = random_pairs()
    written = write_pairs(tmp_path, pairs, layout)
    bundle = load(written, family, loss)
    model: Any = bundle.model.double().eval()
    objective: Any = bundle.objective
    engine = engine_of(accelerator, model, objective)

    shape = (len(written.rows), objective.answers_per_row)
    reference = torch.from_numpy(np.random.default_rng(1).normal(-40, 8, shape))
    expected = expected_loss(model, pairs, written.by_pair(reference), loss)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)

    for rows_each in (4, 1):
        batches = micro_batches(written.with_reference(reference), bundle, rows_each)
        totals = engine.count(batches)
        assert int(totals.denominator) == len(pairs)
        extra = objective.prepass(engine, batches, totals)
        assert ("kl_baseline" in extra) == (loss == "kto")

        model.zero_grad()
        sums = [engine.loss(batch, extra).loss for batch in batches]
        mean_loss = torch.stack(sums).sum() / totals.denominator
        mean_loss.backward()

        assert mean_loss.item() == pytest.approx(expected.item(), rel=1e-10)
        assert relative_gradient_error(model, expected_gradients) < 1e-10


def relative_gradient_error(model: nn.Module, expected: tuple[Tensor | None, ...]) -> float:
    """Return the norm of the error of all gradients, relative to the norm of the gradients."""
    pairs = zip(model.parameters(), expected, strict=True)
    errors = [parameter.grad - gradient for parameter, gradient in pairs if gradient is not None]
    norm = flat_norm([gradient for gradient in expected if gradient is not None])
    assert norm > 1e-3, "there is nothing to compare"
    return flat_norm(errors) / norm


def flat_norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


def test_the_kto_baseline_has_the_same_bits_for_any_order_of_the_rows(
    load, tmp_path: Path, accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_pairs(tmp_path, random_pairs(40))
    bundle = load(written, "gpt2", "kto")
    objective: Any = bundle.objective
    engine = engine_of(accelerator, bundle.model.eval(), objective)
    shape = (len(written.rows), objective.answers_per_row)
    reference = torch.from_numpy(np.random.default_rng(1).normal(-40, 8, shape))
    batches = micro_batches(written.with_reference(reference), bundle, rows_each=1)
    assert len(batches) > 6

    sums: list[Tensor] = []
    sum_over_batches = engine.sum_over_batches

    def record_sums(*arguments: Any) -> Tensor:
        sums.append(sum_over_batches(*arguments))
        return sums[-1]

    monkeypatch.setattr(engine, "sum_over_batches", record_sums)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(len(batches))
        shuffled = [batches[i] for i in order]
        objective.prepass(engine, shuffled, engine.count(shuffled))

    assert len(sums) == 20
    assert sums[0][0] != 0
    assert all(torch.equal(total, sums[0]) for total in sums)


# --- rows of pairs


def test_padding_has_positions_that_the_model_knows(tmp_path: Path) -> None:
    row = write_pairs(tmp_path, [([5], [6], [7], True)]).rows[0]
    padding = np.sum(np.array(row["input_ids"]) == 0)
    assert padding > MAX_LENGTH > max(row["position_ids"])


SHORT_WINDOW = f"{OVERRIDES},sliding_window=9"


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", OVERRIDES),
        ("gpt2", OVERRIDES),
        ("mixtral", OVERRIDES),
        ("mistral", SHORT_WINDOW),
        ("gemma3_text", SHORT_WINDOW),
        ("olmo3", SHORT_WINDOW),
        ("nanochat", None),
        ("lfm2", f"{OVERRIDES},layer_types=[conv,full_attention]"),
    ],
)
def test_two_answers_may_share_a_prompt(
    family: str, overrides: str | None, load, tmp_path: Path
) -> None:
    pairs = random_pairs(6)
    values = {}
    for layout in ("shared prompts", "unpacked"):
        written = write_pairs(tmp_path, pairs, layout)
        bundle = load(written, family, config_overrides=overrides)
        bundle.model.eval()
        values[layout] = written.by_pair(answer_values(written, bundle))
        if layout == "shared prompts":
            assert bundle.model.config._attn_implementation == ATTENTION_NAME

    torch.testing.assert_close(values["shared prompts"], values["unpacked"], rtol=2e-4, atol=2e-3)


@pytest.mark.parametrize(
    ("family", "flag", "layout"),
    [
        ("gemma2", "--no_share_prompts", "separate prompts"),
        ("bloom", "--no_packing", "unpacked"),
        ("mamba", "--no_packing", "unpacked"),
    ],
)
def test_a_class_that_cannot_share_prompts_needs_a_flag(
    family: str, flag: str, layout: str, load, tmp_path: Path
) -> None:
    pairs = random_pairs(3)
    with pytest.raises(UserError, match=f"use {flag}"):
        load(write_pairs(tmp_path, pairs, "shared prompts"), family, config_overrides=None)

    written = write_pairs(tmp_path, pairs, layout)
    bundle = load(written, family, config_overrides=None)
    bundle.model.eval()
    values = written.by_pair(answer_values(written, bundle))

    for (prompt, *answers, _), values_of_pair in zip(pairs, values, strict=True):
        for answer, value in zip(answers, values_of_pair, strict=True):
            with torch.no_grad():
                expected = token_logps(bundle.model, prompt, answer).sum()
            torch.testing.assert_close(value, expected, rtol=2e-4, atol=2e-3)


def test_answers_that_attend_to_each_other_are_noticed(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_blocks = attention_cpu.packed_blocks

    def ignore_other_answers(starts: Any, other_answers: Any = None) -> Any:
        return packed_blocks(starts)

    monkeypatch.setattr(attention_cpu, "packed_blocks", ignore_other_answers)
    with pytest.raises(UserError, match="cannot share a prompt"):
        load(write_pairs(tmp_path, random_pairs(3)))


# --- metrics


def test_metrics_are_means_by_the_names_of_trl(load, tmp_path: Path, accelerator) -> None:
    written = write_pairs(tmp_path, random_pairs(7))
    bundle = load(written)
    engine = engine_of(accelerator, bundle.model.eval(), bundle.objective)
    values = answer_values(written, bundle)
    log_ratios = torch.linspace(3, -3, values.numel()).view_as(values)
    batches = micro_batches(written.with_reference(values - log_ratios), bundle, rows_each=2)

    totals: dict[str, Tensor] = {}
    for batch in batches:
        add_sums(totals, engine.loss(batch).metrics)
    sums = {name: float(total) for name, total in totals.items()}
    metrics = bundle.objective.metrics(sums, extra={})

    logps = written.by_pair(values)
    rewards = 0.1 * written.by_pair(log_ratios)
    assert metrics == pytest.approx(
        {
            "rewards/accuracies": float((rewards[:, 0] > rewards[:, 1]).float().mean()),
            "rewards/margins": float((rewards[:, 0] - rewards[:, 1]).mean()),
            "rewards/chosen": float(rewards[:, 0].mean()),
            "rewards/rejected": float(rewards[:, 1].mean()),
            "logps/chosen": float(logps[:, 0].mean()),
            "logps/rejected": float(logps[:, 1].mean()),
            "kl": float(-written.by_pair(log_ratios).mean()),
        },
        rel=1e-4,
    )


def test_metrics_of_unpaired_answers_are_means_by_their_labels(
    load, tmp_path: Path, accelerator
) -> None:
    written = write_pairs(tmp_path, random_pairs(7))
    bundle = load(written, loss="kto")
    engine = engine_of(accelerator, bundle.model.eval(), bundle.objective)
    values = answer_values(written, bundle)
    log_ratios = torch.linspace(3, -3, values.numel()).view_as(values)
    batch = micro_batches(written.with_reference(values - log_ratios), bundle, rows_each=7)[0]

    sums = {name: float(total) for name, total in engine.loss(batch).metrics.items()}
    metrics = bundle.objective.metrics(sums, {"kl_baseline": torch.tensor(0.5)})

    rewards = 0.1 * written.by_pair(log_ratios)[:, 0]
    is_desirable = torch.tensor([is_first_desirable for *_, is_first_desirable in written.pairs])
    assert metrics["rewards/chosen"] == pytest.approx(float(rewards[is_desirable].mean()), rel=1e-4)
    assert metrics["rewards/rejected"] == pytest.approx(
        float(rewards[~is_desirable].mean()), rel=1e-4
    )
    assert metrics["kl"] == 0.5
    assert "rewards/accuracies" not in metrics


# --- reward models


def check_scores(model: nn.Module, pairs: list[TokenPair], scores: Tensor) -> None:
    """Check that a model gives each answer its score [pairs, 2]."""
    for (prompt, *answers, _), scores_of_pair in zip(pairs, scores, strict=True):
        for answer, score in zip(answers, scores_of_pair, strict=True):
            expected = score_of(model, prompt, answer)
            torch.testing.assert_close(score, expected, rtol=1e-4, atol=1e-5)


def test_transformers_loads_a_reward_model_and_gives_the_same_scores(load, tmp_path: Path) -> None:
    written = write_pairs(tmp_path, random_pairs(4))
    bundle = load(written, "qwen3", "reward")
    bundle.model.eval()
    scores = written.by_pair(answer_values(written, bundle, rows_each=4))

    folder = export_model(bundle, tmp_path / "model")

    loaded = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert type(loaded).__name__ == "Qwen3ForSequenceClassification"
    check_scores(loaded, written.pairs, scores)
    card = (folder / "README.md").read_text()
    assert "# Qwen3ForSequenceClassification, a model of " in card
    assert "model = AutoModelForSequenceClassification.from_pretrained(FOLDER)" in card


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_an_adapter_of_a_reward_model_is_exported_merged_and_continued_with_its_head(
    family: str, load, tmp_path: Path
) -> None:
    written = write_pairs(tmp_path, random_pairs(4))
    base = export_model(load(written, family), tmp_path / "base")
    lora = lt.LoraConfig(lora_r=2)
    bundle = load(written, None, "reward", lora, model_name_or_path=str(base))
    head = bundle.model.get_submodule("score").weight
    initial_head = head.clone()
    train_scores(bundle, written)
    assert not torch.equal(head, initial_head)
    answers = answer_values(written, bundle, rows_each=4)
    scores = written.by_pair(answers)

    folder = export_model(bundle, tmp_path / "model")
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    check_scores(loaded.get_base_model(), written.pairs, scores)

    write_merged(folder, tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert type(merged).__name__.endswith("ForSequenceClassification")
    assert merged.config.pad_token_id == bundle.files.tokenizer.pad_token_id
    check_scores(merged, written.pairs, scores)

    flags = {"model_name_or_path": str(folder), "continue_adapter": True}
    continued = load(written, None, "reward", **flags)
    assert torch.equal(answer_values(written, continued, rows_each=4), answers)
    again = export_model(continued, tmp_path / "again")
    settings = json.loads((again / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["classifier", "score"]

    with pytest.raises(UserError, match="is an adapter of a reward model"):
        load(written, None, "sigmoid", **flags)
    with pytest.raises(UserError, match="cannot write text"):
        TextModel(str(folder))


def train_scores(bundle: lt.ModelBundle, written: WrittenPairs) -> None:
    """Train a reward model for two steps."""
    trained = [p for p in bundle.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(2):
        for batch in micro_batches(written, bundle, rows_each=4):
            scores = bundle.model(**batch, compute=bundle.objective.reference)
            scores[:, ::2].sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_family_without_a_scoring_class_is_refused_before_data_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_request(*arguments: object, **options: object) -> None:
        pytest.fail("the data were prepared")

    monkeypatch.setattr("llmtrain.training.rows.DataRequest", make_request)
    (tmp_path / "config.json").write_text('{"model_type": "lfm2"}')
    for source in ("--from_config lfm2", f"--model_name_or_path {tmp_path}"):
        settings = lt.parse(preference.DEFAULTS, f"{source} --loss_type reward".split())
        with pytest.raises(UserError, match="class for lfm2"):
            preference.tokenized(settings)


# --- settings


def test_reward_models_and_adapters_have_a_higher_default_learning_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where nothing was fine-tuned
    learning_rates = {
        "": 1e-6,
        "--lora_r 4": 1e-5,
        "--loss_type reward --learning_rate 1e-4": 1e-4,
    }
    for flags, learning_rate in learning_rates.items():
        settings = lt.parse(preference.DEFAULTS, flags.split())
        with pytest.raises(UserError, match="make runs/finetune first"):
            preference.tokenized(settings)
        assert settings.optim.learning_rate == learning_rate


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0}, "--beta 0 "),
        ({"beta": math.nan}, "--beta nan "),
        ({"label_smoothing": 0.5}, "--label_smoothing 0.5"),
        (
            {"loss_type": ["ipo"], "label_smoothing": 0.1},
            "--label_smoothing is not for --loss_type i",
        ),
        ({"loss_type": ["kto"], "undesirable_weight": -1.0}, "--undesirable_weight -1.0"),
        ({"loss_type": ["dpo"]}, "--loss_type dpo does not exist; use one of sigmoid, "),
        ({"loss_type": ["ipo", "kto"]}, "use losses of one kind"),
        ({"loss_type": ["reward", "sft"]}, "use losses of one kind"),
        (
            {"loss_type": ["ipo", "sft"], "loss_weights": [1.0]},
            "--loss_weights has 1 value for 2 losses",
        ),
        ({"loss_weights": [-1.0]}, "--loss_weights -1.0 is out of range"),
        ({"loss_type": ["reward", "reward"]}, "use losses of one kind"),
        ({"loss_type": []}, "--loss_type is empty; use one of sigmoid"),
        ({"beta": math.inf}, "--beta inf is out of range: it must be finite"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lt.PreferenceConfig(**settings)


# --- the rounding of ORPO


def orpo_loss(mean_logps: Tensor) -> Tensor:
    """Return the package's ORPO loss of pairs of answers with one token [..., 2]."""
    answers = lt.Answers(
        logps=mean_logps,
        tokens=torch.ones_like(mean_logps),
        reference=torch.zeros_like(mean_logps),
        desirable=torch.ones_like(mean_logps[..., 0], dtype=torch.bool),
    )
    return orpo(answers, lt.PreferenceConfig(loss_type=["orpo"], beta=0.3))


@pytest.mark.parametrize("confident_logp", [-2e-8, -1e-7, -1e-3, -0.69, -0.7])
def test_orpo_is_accurate_for_answers_that_are_nearly_certain(confident_logp: float) -> None:
    mean_logps = torch.tensor([[confident_logp, -3.0], [-3.0, confident_logp]], requires_grad=True)
    loss = orpo_loss(mean_logps)
    loss.sum().backward()

    exact_logps = mean_logps.detach().double().requires_grad_()
    log_odds = exact_logps - torch.log(-torch.expm1(exact_logps))
    log_odds_ratio = log_odds[:, 0] - log_odds[:, 1]
    exact_loss = -exact_logps[:, 0] - 0.3 * F.logsigmoid(log_odds_ratio)
    exact_loss.sum().backward()

    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(mean_logps.grad.double(), exact_logps.grad, rtol=1e-6, atol=1e-7)


def test_orpo_is_finite_for_answers_whose_probability_rounds_to_one() -> None:
    mean_logps = torch.tensor(
        [[0.0, -3.0], [-3.0, 0.0], [0.0, 0.0], [1e-7, -3.0]], requires_grad=True
    )
    loss = orpo_loss(mean_logps)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert mean_logps.grad.isfinite().all()


# --- the table of losses, and losses that a recipe adds


PARAMETERS = (
    "label_smoothing",
    "desirable_weight",
    "undesirable_weight",
    "simpo_gamma",
)


@pytest.mark.parametrize("name", lt.PreferenceConfig.losses)
def test_a_loss_lists_the_parameters_that_its_formula_reads(name: str) -> None:
    """The flags of other parameters are refused."""
    loss = lt.PreferenceConfig.losses[name]
    torch.manual_seed(0)
    answers = lt.Answers(
        logps=-60 * torch.rand(5, 2),
        reference=-60 * torch.rand(5, 2),
        tokens=torch.randint(1, 20, (5, 2)).float(),
        desirable=torch.rand(5) > 0.5,
    )
    config = lt.PreferenceConfig(loss_type=["sigmoid"], label_smoothing=0.1)
    value = loss.formula(answers, config)

    parameters_read = []
    for parameter in PARAMETERS:
        changed = dataclasses.replace(config)
        setattr(changed, parameter, 0.3)
        if not torch.equal(loss.formula(answers, changed), value):
            parameters_read.append(parameter)

    assert sorted(parameters_read) == sorted(loss.parameters)


def squared(answers: lt.Answers, config: Any) -> Tensor:
    """Return the squared distance of each margin from a target."""
    margins = answers.log_ratios[..., 0] - answers.log_ratios[..., 1]
    return (margins - config.target_margin) ** 2


@dataclass
class RecipeLosses(lt.PreferenceConfig):
    """The losses of the package, and another one with a parameter."""

    losses: ClassVar[Mapping[str, lt.PreferenceLoss]] = {
        **lt.PreferenceConfig.losses,
        "squared": lt.PreferenceLoss(squared, "squared margin", parameters=("target_margin",)),
    }

    target_margin: float = lt.flag(1.0, "squared: the margin to reach")


def parse(flags: str) -> Any:
    defaults = dataclasses.replace(preference.DEFAULTS, preference=RecipeLosses())
    return lt.parse(defaults, flags.split()).preference


def test_a_loss_of_a_recipe_is_a_choice_of_its_flag_only() -> None:
    config = parse("--loss_type squared sft --target_margin 3")
    assert config.selected_losses[0].formula is squared
    assert config.target_margin == 3
    with pytest.raises(UserError, match="'squared'"):
        lt.parse(preference.DEFAULTS, ["--loss_type", "squared"])
    with pytest.raises(UserError, match="--target_margin is not for --loss_type sigmoid"):
        parse("--target_margin 3")
