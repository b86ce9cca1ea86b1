"""Losses that compare answers: each is its formula, whatever rows the pairs lie in, on any family."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import AutoPeftModelForSequenceClassification
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

import llmtrain as lt
from llmtrain.data import tokenizer as tok
from llmtrain.data.loader import Collate, SlotRows
from llmtrain.data.samplers import Slot
from llmtrain.data.store import TokenRows
from llmtrain.errors import UserError
from llmtrain.interfaces.answer_codes import answer_of, pair_of
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.models.adapters import write_merged
from llmtrain.models.attention import ATTENTION_NAME
from llmtrain.models.config import ModelConfig
from llmtrain.models.export import how_to_load
from llmtrain.models.generation import TextModel
from llmtrain.models.preference import Answers
from llmtrain.models.preference_config import PreferenceConfig
from llmtrain.models.preference_losses import orpo
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.engine import add_metrics
from llmtrain.parallel.placement import place
from llmtrain.record.saver import write_model
from recipes import preference
from tests.engines import engine_of
from tests.families import FAMILIES, OVERRIDES
from tests.pair_rows import write_pair_rows
from tests.trl_losses import trl_dpo_loss, trl_kto_loss

BLOCK = 32
LOSSES = {
    "sigmoid": {},
    "sigmoid, smoothed": {"label_smoothing": 0.2},
    "robust": {"label_smoothing": 0.2},
    "ipo": {},
    "kto": {"desirable_weight": 1.3, "undesirable_weight": 0.7},
    "orpo": {},
    "simpo": {"beta": 2.0, "label_smoothing": 0.1},
    "reward": {},
}
# Of each loss that only TRL's code is compared with: its parameters.
LIKE_TRL: dict[str, dict[str, Any]] = {
    "sigmoid_norm": {"beta": 2.0},
    "hinge": {"beta": 0.05},
    "exo_pair": {"label_smoothing": 1e-3},
    "nca_pair": {},
    "bco_pair": {},
    "sppo_hard": {},
    "aot": {},
    "aot, smoothed": {"label_smoothing": 0.2},
    "aot_unpaired": {},
    "aot_unpaired, smoothed": {"label_smoothing": 0.2},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {},
    "sft": {},
    "apo_zero_unpaired": {"desirable_weight": 1.3, "undesirable_weight": 0.7},
    "MPO": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "aot and sft": {"loss_type": ["aot", "sft"], "loss_weights": [1.0, 0.5]},
}


def config_of(loss: str) -> PreferenceConfig:
    parameters: dict[str, Any] = {"loss_type": [loss.partition(",")[0]]}
    return PreferenceConfig(**(parameters | {**LOSSES, **LIKE_TRL}[loss]))


class Pair(tuple[list[int], list[int], list[int], bool]):
    """A prompt, two answers, and whether the first is desirable."""


def some_pairs(count: int = 9, seed: int = 0) -> list[Pair]:
    draw = np.random.default_rng(seed)

    def tokens(most: int) -> list[int]:
        return draw.integers(1, 250, draw.integers(1, most)).tolist()

    return [
        Pair((tokens(18), tokens(14), tokens(14), bool(draw.integers(2)))) for _ in range(count)
    ]


def rows_of(pairs: list[Pair], folder: Path, layout: str) -> TokenRows:
    rows, written = write_pair_rows(
        folder / f"{layout}.arrow",
        pairs,
        width=2 * BLOCK,
        share_prompts=layout == "one prompt",
        packing=layout != "halves",
    )
    rows.pairs = written.pairs  # type: ignore[attr-defined]
    return rows


def batches_of(rows: TokenRows, bundle: ModelBundle, micro_batch: int) -> list[Batch]:
    """Return micro-batches of all rows, with padding up to a multiple of four rows."""
    slots = [Slot(i, i if i < len(rows) else None) for i in range(-(-len(rows) // 4) * 4)]
    collate = Collate(micro_batch, prepare=bundle.prepare_batch)
    return collate(SlotRows(rows).__getitems__(slots)).batches


def values_of(rows: TokenRows, bundle: ModelBundle, micro_batch: int = 2) -> Tensor:
    """Return the log-probability, or the score, of each answer [rows, answers of a row]."""
    values = [
        bundle.model(**batch, compute=bundle.objective.reference)
        for batch in batches_of(rows, bundle, micro_batch)
    ]
    return torch.cat(values).detach()


@pytest.fixture(scope="module")
def words() -> Any:
    return tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)


@pytest.fixture
def load(words: Any, accelerator) -> Callable[..., ModelBundle]:
    def load(
        rows: TokenRows, family: str = "llama", loss: str = "sigmoid", **settings: Any
    ) -> ModelBundle:
        columns = rows.column_names
        facts = SimpleNamespace(
            dataset="pairs", pairs=rows.pairs, shared=settings.pop("shared", True)
        )  # type: ignore[attr-defined]
        stand_in: Any = SimpleNamespace(
            tokenizer=words, stop_token_ids=(), new_tokens=[], metadata=facts
        )
        stand_in.is_packed = "position_ids" in columns
        overrides = {"config_overrides": OVERRIDES, "max_length": BLOCK, "from_config": family}
        preference = config_of(loss)
        lora = settings.pop("lora", None)
        config = ModelConfig(**(overrides | settings))
        return place(
            accelerator, load_model(config, lora, stand_in, 3, "no", preference=preference)
        )

    return load


@pytest.fixture
def norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def forward(self: Any, hidden: Tensor) -> Tensor:
        return (
            self.weight
            * hidden
            * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)


def some_reference(rows: TokenRows, bundle: ModelBundle) -> Tensor:
    """Return log-probabilities that a reference model could have, float64 [rows, answers of a row]."""
    objective: Any = bundle.objective
    shape = (len(rows), objective.rows.answers_per_row)
    return torch.from_numpy(np.random.default_rng(1).normal(-40, 8, shape))


def with_reference(rows: TokenRows, values: Tensor) -> TokenRows:
    """Return rows with the column ``reference`` [rows, answers of a row], in float64."""
    import pyarrow

    kind = pyarrow.list_(pyarrow.float64(), values.shape[1])
    found = TokenRows(
        rows.data.append_column(
            "reference",
            pyarrow.FixedSizeListArray.from_arrays(values.double().flatten().numpy(), type=kind),
        )
    )
    found.pairs = rows.pairs  # type: ignore[attr-defined]
    return found


def plainly(
    model: nn.Module,
    pairs: list[Pair],
    reference: list[list[float]],
    config: PreferenceConfig,
    is_like_trl: bool,
) -> Tensor:
    """The mean loss over the pairs, each answer alone in a forward of transformers' own, formula by formula.

    If it is like TRL's, the formula is in TRL's own code.
    """
    own = model.own_class
    beta = config.beta
    eps = config.label_smoothing
    kind = config.loss_type[0]
    terms = []
    moved = []

    def of_tokens(prompt: list[int], answer: list[int]) -> Tensor:
        ids = torch.tensor([prompt + answer])
        if kind == "reward":
            return own.forward(model, input_ids=ids, attention_mask=torch.ones_like(ids)).logits[
                0, 0
            ]
        logits = own.forward(model, input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, 1)[range(len(answer)), answer]

    if is_like_trl:
        log_ratios = torch.tensor(reference, dtype=torch.float64)
        if config.is_unpaired:
            answers = [of_tokens(prompt, first) for prompt, first, *_ in pairs]
            return trl_kto_loss(config, answers, log_ratios[:, 0], [pair[3] for pair in pairs])
        of_pairs = [
            (of_tokens(prompt, first), of_tokens(prompt, second))
            for prompt, first, second, _ in pairs
        ]
        return trl_dpo_loss(config, of_pairs, log_ratios)

    def sums(prompt: list[int], answer: list[int]) -> Tensor:
        return of_tokens(prompt, answer).sum()

    for (prompt, first, second, _), (for_first, for_second) in zip(pairs, reference, strict=True):
        one, other = sums(prompt, first), sums(prompt, second)
        moved.append((one - for_first, other - for_second, one, other))
    z = torch.stack([other for _, other, *_ in moved]).mean().clamp(min=0).detach()
    for (_, first, second, desirable), (up, down, one, other) in zip(pairs, moved, strict=True):
        mean, other_mean = one / len(first), other / len(second)
        h = beta * (up - down)
        if kind == "reward":
            terms.append(-F.logsigmoid(one - other))
        elif kind == "ipo":
            terms.append((up / len(first) - down / len(second) - 1 / (2 * beta)) ** 2)
        elif kind == "kto" and desirable:
            terms.append(config.desirable_weight * (1 - torch.sigmoid(beta * (up - z))))
        elif kind == "kto":
            terms.append(config.undesirable_weight * (1 - torch.sigmoid(beta * (z - up))))
        elif kind == "orpo":
            p, q = mean.exp(), other_mean.exp()
            terms.append(
                -mean - beta * F.logsigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q)))
            )
        elif kind == "simpo":
            h = beta * (mean - other_mean) - config.simpo_gamma
            terms.append(-(1 - eps) * F.logsigmoid(h) - eps * F.logsigmoid(-h))
        elif kind == "robust":
            terms.append((-(1 - eps) * F.logsigmoid(h) + eps * F.logsigmoid(-h)) / (1 - 2 * eps))
        else:
            terms.append(-(1 - eps) * F.logsigmoid(h) - eps * F.logsigmoid(-h))
    return torch.stack(terms).mean()


def pairs_in_rows(rows: TokenRows, pairs: list[Pair]) -> list[tuple[int, int, int]]:
    """Where each pair lies: its row, its place among the row's, and its number."""
    found = []
    for row in range(len(rows)):
        columns = rows[row]
        codes = np.array(columns["answers"])
        for at in range(pair_of(codes.max()) + 1):
            judged = (answer_of(codes) == 2 * at) & (np.array(columns["labels"]) >= 0)
            first = np.array(columns["labels"])[judged].tolist()
            (number,) = [i for i, pair in enumerate(pairs) if pair[1] == first]
            found.append((row, at, number))
    return found


@pytest.mark.parametrize(
    ("family", "loss", "layout"),
    [
        *itertools.product(["gpt2", "llama"], LOSSES, ["one prompt", "two prompts", "halves"]),
        *itertools.product(["llama"], LIKE_TRL, ["one prompt", "halves"]),
    ],
)
def test_loss_and_gradient_are_the_formulas_in_whatever_rows_and_micro_batches(
    family: str,
    loss: str,
    layout: str,
    load,
    tmp_path: Path,
    norms_in_float64: None,
    accelerator,
    score,
) -> None:
    pairs = some_pairs()
    rows = rows_of(pairs, tmp_path, layout)
    bundle = load(rows, family, loss, shared=layout == "one prompt")
    model: Any = bundle.model.double().eval()
    objective: Any = bundle.objective
    engine = engine_of(accelerator, model, objective)
    reference = some_reference(rows, bundle)
    placed = pairs_in_rows(rows, pairs)
    assert sorted(number for *_, number in placed) == list(range(len(pairs)))
    of_pairs: list[Any] = [None] * len(pairs)
    for row, at, number in placed:
        of_pairs[number] = reference[row, 2 * at : 2 * at + 2].tolist()
    expected = plainly(model, pairs, of_pairs, objective.config, is_like_trl=loss in LIKE_TRL)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    for micro_batch in (4, 1):
        batches = batches_of(with_reference(rows, reference), bundle, micro_batch)
        totals = engine.count(batches)
        assert int(totals.denominator) == len(pairs)
        extra = objective.prepass(engine, batches, totals)
        assert ("kl_baseline" in extra) == (loss == "kto")

        model.zero_grad()
        sums = [engine.loss(batch, extra).loss for batch in batches]
        mean_loss = torch.stack(sums).sum() / totals.denominator
        mean_loss.backward()
        assert float(mean_loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
        gradients = [
            (p.grad, gradient)
            for p, gradient in zip(model.parameters(), expected_gradients, strict=True)
            if gradient is not None
        ]
        norm = torch.stack([gradient.norm() for _, gradient in gradients]).norm()
        assert norm > 1e-3, "there is something to compare"
        differences = [(ours - gradient).norm() for ours, gradient in gradients]
        difference = float(torch.stack(differences).norm() / norm)
        assert difference < 1e-10
        score(
            f"preferences: {family}, {loss}, {layout}: "
            f"gradient beside the formula's {difference:.1e}"
        )


def test_the_baseline_has_the_same_bits_in_whatever_order_rows_are_added(
    load, tmp_path: Path, accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(some_pairs(40), tmp_path, "one prompt")
    bundle = load(rows, "gpt2", "kto")
    objective: Any = bundle.objective
    engine = engine_of(accelerator, bundle.model.eval(), objective)
    batches = batches_of(with_reference(rows, some_reference(rows, bundle)), bundle, micro_batch=1)
    assert len(batches) > 6

    summed: list[Tensor] = []
    sum_over_batches = engine.sum_over_batches

    def note_sums(*arguments: Any) -> Tensor:
        summed.append(sum_over_batches(*arguments))
        return summed[-1]

    monkeypatch.setattr(engine, "sum_over_batches", note_sums)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(len(batches))
        shuffled = [batches[i] for i in order]
        objective.prepass(engine, shuffled, engine.count(shuffled))
    assert len(summed) == 20
    assert summed[0][0] != 0
    assert all(torch.equal(sums, summed[0]) for sums in summed)


def test_the_padding_of_a_nearly_empty_row_has_positions_that_the_model_knows(
    tmp_path: Path,
) -> None:
    row = rows_of([Pair(([5], [6], [7], True))], tmp_path, "one prompt")[0]
    assert np.sum(np.array(row["input_ids"]) == 0) > BLOCK > max(row["position_ids"])


@pytest.mark.parametrize(
    "family", [*(name for name in FAMILIES if name != "gemma2"), "olmo3", "nanochat"]
)
def test_two_answers_go_on_from_one_prompt_as_from_two(family: str, load, tmp_path: Path) -> None:
    pairs = some_pairs(6)
    overrides = "" if family == "nanochat" else OVERRIDES
    if family in ("mistral", "gemma3_text", "olmo3"):
        overrides += ",sliding_window=9"
    values_by_pair = {}
    for layout in ("one prompt", "halves"):
        rows = rows_of(pairs, tmp_path, layout)
        shares_prompts = layout == "one prompt"
        bundle = load(rows, family, config_overrides=overrides or None, shared=shares_prompts)
        model: Any = bundle.model.eval()
        values = values_of(rows, bundle)
        values_by_pair[layout] = {
            number: values[row, 2 * at : 2 * at + 2]
            for row, at, number in pairs_in_rows(rows, pairs)
        }
        if shares_prompts:
            assert model.config._attn_implementation == ATTENTION_NAME
    for number, expected in values_by_pair["halves"].items():
        torch.testing.assert_close(
            values_by_pair["one prompt"][number], expected, rtol=2e-4, atol=2e-3
        )


@pytest.mark.parametrize(
    ("family", "flag", "layout"),
    [
        ("gemma2", "--no_share_prompts", "two prompts"),
        ("opt", "--no_packing", "halves"),
        ("bloom", "--no_packing", "halves"),
        ("mamba", "--no_packing", "halves"),
    ],
)
def test_a_class_that_cannot_share_a_prompt_says_what_to_leave_out_and_then_learns(
    family: str, flag: str, layout: str, load, tmp_path: Path
) -> None:
    pairs = some_pairs(3)
    with pytest.raises(UserError, match=f"use {flag}"):
        load(rows_of(pairs, tmp_path, "one prompt"), family, config_overrides=None)
    rows = rows_of(pairs, tmp_path, layout)
    bundle = load(rows, family, config_overrides=None, shared=False)
    model: Any = bundle.model.eval()
    values = values_of(rows, bundle)
    for row, at, number in pairs_in_rows(rows, pairs):
        prompt, first, second, _ = pairs[number]
        for which, answer in enumerate((first, second)):
            ids = torch.tensor([prompt + answer])
            with torch.no_grad():
                logits = model.own_class.forward(model, input_ids=ids).logits[0]
            places = range(len(prompt) - 1, len(prompt + answer) - 1)
            expected = torch.log_softmax(logits, 1)[places, answer].sum()
            torch.testing.assert_close(values[row, 2 * at + which], expected, rtol=2e-4, atol=2e-3)


def test_answers_that_saw_each_other_would_be_noticed(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmtrain.models import attention_cpu

    packed_blocks = attention_cpu.packed_blocks
    monkeypatch.setattr(
        attention_cpu, "packed_blocks", lambda starts, other_answers=None: packed_blocks(starts)
    )
    rows = rows_of(some_pairs(3), tmp_path, "one prompt")
    with pytest.raises(UserError, match="cannot share a prompt"):
        load(rows)


def test_a_reward_model_is_transformers_own_and_scores_as_it_did_here(load, tmp_path: Path) -> None:
    pairs = some_pairs(4)
    rows = rows_of(pairs, tmp_path, "one prompt")
    bundle = load(rows, "qwen3", "reward")
    model: Any = bundle.model.eval()
    scores = values_of(rows, bundle, micro_batch=4)
    tensors = bundle.files.export_tensors(model)
    write_model(tmp_path / "model", bundle.files, tensors)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert type(theirs).__name__ == "Qwen3ForSequenceClassification"
    card = (tmp_path / "model" / "README.md").read_text()
    assert "# A reward model of " in card
    assert "model = AutoModelForSequenceClassification.from_pretrained(FOLDER)" in card
    for row, at, number in pairs_in_rows(rows, pairs):
        for which in (0, 1):
            ids = torch.tensor([pairs[number][0] + pairs[number][1 + which]])
            torch.testing.assert_close(
                theirs(ids).logits[0, 0], scores[row, 2 * at + which], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_an_adapter_of_a_reward_model_has_its_head(family: str, load, words, tmp_path) -> None:
    pairs = some_pairs(4)
    rows = rows_of(pairs, tmp_path, "one prompt")
    base = load(rows, family)
    write_model(tmp_path / "base", base.files, base.files.export_tensors(base.model))
    name = {"model_name_or_path": str(tmp_path / "base"), "from_config": None}
    name["config_overrides"] = None
    bundle = load(rows, loss="reward", lora=lt.LoraConfig(lora_r=2), **name)
    head = bundle.model.get_submodule("score")
    assert head.weight.requires_grad
    before = head.weight.clone()
    train_scores(bundle, rows)
    assert not torch.equal(head.weight, before)
    scores = values_of(rows, bundle, micro_batch=4)

    folder = tmp_path / "model"
    write_model(folder, bundle.files, bundle.files.export_tensors(bundle.model))
    assert how_to_load(folder) == "peft: AutoPeftModelForSequenceClassification.from_pretrained"
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    write_merged(folder, tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert type(merged).__name__.endswith("ForSequenceClassification")
    for row, at, number in pairs_in_rows(rows, pairs):
        for which in (0, 1):
            ids = torch.tensor([pairs[number][0] + pairs[number][1 + which]])
            score = scores[row, 2 * at + which]
            for model in (theirs, merged):
                torch.testing.assert_close(model(ids).logits[0, 0], score, rtol=1e-4, atol=1e-5)

    name["model_name_or_path"] = str(folder)
    again = load(rows, loss="reward", continue_adapter=True, **name)
    assert torch.equal(values_of(rows, again, micro_batch=4), scores)
    assert again.files.adapted.peft_config["default"].modules_to_save == ["classifier", "score"]
    with pytest.raises(UserError, match="is an adapter of a reward model, which this run does not"):
        load(rows, loss="sigmoid", continue_adapter=True, **name)
    with pytest.raises(UserError, match="is a reward model, which scores answers"):
        TextModel(str(folder))


def train_scores(bundle: ModelBundle, rows: TokenRows) -> None:
    """Train a reward model for two steps."""
    trained = [p for p in bundle.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(2):
        for batch in batches_of(rows, bundle, micro_batch=4):
            scores = bundle.model(**batch, compute=bundle.objective.reference)
            scores[:, ::2].sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_family_without_a_scoring_class_is_refused_by_name(load, tmp_path: Path) -> None:
    rows = rows_of(some_pairs(3), tmp_path, "one prompt")
    with pytest.raises(UserError, match="no sequence classification class for nanochat"):
        load(rows, "nanochat", "reward", config_overrides=None)


@pytest.mark.parametrize("length", ["1024", "auto"])
@pytest.mark.parametrize("source", ["type", "folder"])
def test_such_a_family_is_refused_before_the_data_are_prepared(
    source: str, length: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        pytest.fail("the data were prepared")

    monkeypatch.setattr("llmtrain.data.prepare.tokenize", fail)
    flags = ["--from_config", "lfm2"]
    if source == "folder":
        (tmp_path / "config.json").write_text('{"model_type": "lfm2"}')
        flags = ["--model_name_or_path", str(tmp_path)]
    settings = lt.parse(
        preference.DEFAULTS, [*flags, "--loss_type", "reward", "--max_length", length]
    )
    with pytest.raises(UserError, match=r"class for lfm2; .* such as llama, qwen3 or gpt2"):
        preference.tokenized(settings)


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        ([], 1e-6),
        (["--lora_r", "4"], 1e-5),
        (["--loss_type", "reward"], 1e-5),
        (["--loss_type", "kto"], 1e-6),
        (["--loss_type", "reward", "--learning_rate", "1e-4"], 1e-4),
    ],
)
def test_a_reward_model_and_an_adapter_have_a_higher_default_rate(
    flags: list[str], rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BeforeDataError(Exception):
        pass

    def stop(*_: object) -> None:
        raise BeforeDataError

    monkeypatch.setattr(preference.lt, "newest_model", stop)
    settings = preference.lt.parse(preference.DEFAULTS, flags)
    with pytest.raises(BeforeDataError):
        preference.tokenized(settings)
    assert settings.optim.learning_rate == rate


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_the_families_that_the_refusal_names_can_be_reward_models(
    family: str, load, tmp_path: Path
) -> None:
    PreferenceConfig(loss_type=["reward"]).check_family(ModelConfig(from_config=family))
    rows = rows_of(some_pairs(3), tmp_path, "one prompt")
    assert load(rows, family, "reward").model.gives_scores


def test_metrics_are_means_by_trls_names(load, tmp_path: Path, accelerator) -> None:
    pairs = some_pairs(7)
    rows = rows_of(pairs, tmp_path, "one prompt")
    bundle = load(rows)
    engine = engine_of(accelerator, bundle.model.eval(), bundle.objective)
    values = values_of(rows, bundle)
    reference = values + torch.linspace(-3, 3, values.numel()).view_as(values)

    totals: dict[str, Tensor] = {}
    for batch in batches_of(with_reference(rows, reference), bundle, micro_batch=2):
        add_metrics(totals, engine.loss(batch).metrics)
    sums = {name: float(total) for name, total in totals.items()}
    metrics = bundle.objective.metrics(sums, extra={})

    places = [(row, slice(2 * at, 2 * at + 2)) for row, at, _ in pairs_in_rows(rows, pairs)]
    moved = torch.stack([(values - reference)[place] for place in places])
    logps = torch.stack([values[place] for place in places])
    expected = {
        "rewards/accuracies": float((moved[:, 0] > moved[:, 1]).float().mean()),
        "rewards/margins": float(0.1 * (moved[:, 0] - moved[:, 1]).mean()),
        "rewards/chosen": float(0.1 * moved[:, 0].mean()),
        "rewards/rejected": float(0.1 * moved[:, 1].mean()),
        "logps/chosen": float(logps[:, 0].mean()),
        "logps/rejected": float(logps[:, 1].mean()),
        "kl": float(-moved.mean()),
    }
    assert metrics == pytest.approx(expected, rel=1e-4)


def test_unpaired_answers_have_no_share_of_pairs(load, tmp_path: Path, accelerator) -> None:
    rows = rows_of(some_pairs(7), tmp_path, "one prompt")
    bundle = load(rows, loss="kto")
    engine = engine_of(accelerator, bundle.model.eval(), bundle.objective)
    (batch,) = batches_of(with_reference(rows, values_of(rows, bundle)), bundle, micro_batch=7)[:1]
    sums = {name: float(total) for name, total in engine.loss(batch).metrics.items()}
    metrics = bundle.objective.metrics(sums, {"kl_baseline": torch.tensor(0.5)})
    assert "rewards/accuracies" not in metrics
    assert {"kl", "rewards/margins", "rewards/chosen", "rewards/rejected"} < metrics.keys()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"beta": 0}, "--beta 0 is out of range"),
        ({"beta": math.nan}, "--beta nan is out of range"),
        ({"label_smoothing": 0.5}, "--label_smoothing 0.5"),
        (
            {"loss_type": ["ipo"], "label_smoothing": 0.1},
            "--label_smoothing is for --loss_type sigmoid, robust, exo_pair, aot, aot_unpaired, "
            "simpo; leave it out.",
        ),
        ({"desirable_weight": 2.0}, "--desirable_weight is for --loss_type kto"),
        (
            {"loss_type": ["kto"], "undesirable_weight": -1.0},
            "--undesirable_weight -1.0 is out of range",
        ),
        ({"simpo_gamma": 1.0}, "--simpo_gamma is for --loss_type simpo"),
        ({"discopop_tau": 1.0}, "--discopop_tau is for --loss_type discopop"),
        ({"loss_type": ["discopop"], "discopop_tau": 0}, "--discopop_tau 0 is out of range"),
        ({"loss_type": []}, "--loss_type is empty: name a loss"),
        ({"loss_type": "ipo"}, "--loss_type i does not exist; use one of sigmoid, "),
        ({"loss_type": ["exo_pair"]}, "exo_pair needs --label_smoothing above 0"),
        ({"loss_type": ["ipo", "kto"]}, "adds losses of pairs to losses of single answers"),
        ({"loss_type": ["reward", "sft"]}, "trains a reward model, which has no log-prob"),
        (
            {"loss_type": ["ipo", "sft"], "loss_weights": [1.0]},
            "--loss_weights has 1 values and --loss_type 2; give one weight for each loss.",
        ),
        ({"loss_weights": [-1.0]}, "--loss_weights -1.0 is out of range"),
    ],
)
def test_settings_that_mean_nothing_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        PreferenceConfig(**flags)


def orpo_loss(mean_logps: Tensor) -> Tensor:
    """Return the ORPO loss of pairs [..., 2] of one-token answers."""
    answers = Answers(
        logps=mean_logps,
        tokens=torch.ones_like(mean_logps),
        reference=torch.zeros_like(mean_logps),
        desirable=torch.ones_like(mean_logps[..., 0], dtype=torch.bool),
    )
    config = PreferenceConfig(loss_type=["orpo"], beta=0.3)
    return orpo(answers, config)


@pytest.mark.parametrize("confident", [-2e-8, -1e-7, -1e-3, -0.69, -0.7])
def test_the_gradient_of_orpo_is_right_for_answers_that_are_nearly_certain(
    confident: float,
) -> None:
    means = [[confident, -3.0], [-3.0, confident]]
    mean_logps = torch.tensor(means, requires_grad=True)
    loss = orpo_loss(mean_logps)
    loss.sum().backward()

    exact = mean_logps.detach().double().requires_grad_()
    exact_loss = _orpo_loss_in_float64(exact)
    exact_loss.sum().backward()

    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(mean_logps.grad.double(), exact.grad, rtol=1e-6, atol=1e-7)


def _orpo_loss_in_float64(mean: Tensor) -> Tensor:
    odds = mean - torch.log(-torch.expm1(mean))
    return -mean[:, 0] - 0.3 * F.logsigmoid(odds[:, 0] - odds[:, 1])


def test_the_gradient_of_orpo_is_finite_for_answers_whose_probability_rounds_to_one() -> None:
    mean_logps = torch.tensor(
        [[0.0, -3.0], [-3.0, 0.0], [0.0, 0.0], [1e-7, -3.0]], requires_grad=True
    )
    loss = orpo_loss(mean_logps)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert mean_logps.grad.isfinite().all()


def test_orpo_has_the_bits_of_the_plain_formula_unless_an_answer_is_likely() -> None:
    mean_logps = -torch.rand(1000, 2, generator=torch.Generator().manual_seed(0)) * 20 - 0.7
    plain_odds = mean_logps - torch.log1p(-mean_logps.exp())
    plain_loss = -mean_logps[:, 0] - 0.3 * F.logsigmoid(plain_odds[:, 0] - plain_odds[:, 1])
    assert torch.equal(orpo_loss(mean_logps), plain_loss)
