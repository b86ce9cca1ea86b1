"""What distillation is worth beside SFT, and what a teacher's k likeliest tokens leave out.

The data are functions of Python's library, and the answers are their docstrings. A teacher and a
smaller student are trained first. The teacher has seen all answers, and the student has seen
functions alone.

**quality**: the student is trained on the answers, on all of them (half an epoch) or on a sixteenth
(eight epochs), for equal tokens. Each method has three seeds. The learning rate of SFT was the best
of three with seed 0. That of the others was chosen offline with a weaker teacher. The figure is the
eval nll, in nats per target token; details have its 95 % interval by Student's t.

**top_k**: the forward KL from this teacher to the student after SFT, over k + 1 outcomes and over
the whole vocabulary.

Repeat both or one with `pip install 'llmtrain[bench]'` and
`python -m benchmarks.distill [quality] [top_k] [--folder FOLDER]`. They take an hour on two cores.
Models that FOLDER has are not trained again.
"""

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.comparison import Table
from benchmarks.inputs import write_conversations_of_functions, write_llama
from benchmarks.runs import FINETUNE_RECIPE, STEPS_ONLY, flags, new_run_flags, run, scratch
from llmtrain.models.distillation_objective import generalized_jsd, top_k_outcomes

DISTILL_RECIPE = "recipes/distill.py"
LENGTH = 512  # tokens of a row
EVAL_CHATS = 400
SEEDS = (0, 1, 2)
STEPS = 80  # of 8 packed rows
LEARNING_RATES = {
    ("all", "sft"): 0.01,
    ("all", "live"): 0.01,
    ("sixteenth", "sft"): 0.003,
    ("sixteenth", "offline"): 0.01,
    ("sixteenth", "live"): 0.01,
}
DATA = {"all": 1, "sixteenth": 16}  # the training conversations, divided by this number
TOP_K = (8, 32, 64, 256)
MODELS = {"teacher": (192, 4), "student": (96, 2)}  # the width and the layers
VOCABULARY = 2000

# --- the models and conversations of all tables


def write_inputs(folder: Path) -> None:
    """Write conversations, texts for pretraining, and models with random weights."""
    write_conversations_of_functions(folder / "chats.jsonl")
    lines = (folder / "chats.jsonl").read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    train_lines = lines[EVAL_CHATS:]
    (folder / "eval.jsonl").write_text("".join(lines[:EVAL_CHATS]))
    for name, divisor in DATA.items():
        (folder / f"{name}.jsonl").write_text("".join(train_lines[: len(train_lines) // divisor]))

    chats = [json.loads(line)["messages"] for line in train_lines]
    texts = [message["content"] for chat in chats for message in chat]
    for role, (width, layers) in MODELS.items():
        write_llama(
            folder / f"random-{role}",
            texts,
            LENGTH,
            width,
            layers,
            VOCABULARY,
            tie_word_embeddings=True,
        )

    tokenizer = AutoTokenizer.from_pretrained(folder / "random-teacher")
    for role, turns in (("teacher", 2), ("student", 1)):
        with (folder / f"{role}.jsonl").open("w") as file:
            for chat in chats:
                text = tokenizer.apply_chat_template(chat[:turns], tokenize=False)
                file.write(json.dumps({"text": text}) + "\n")


def train(folder: Path, name: str, recipe: str, **values: object) -> Path:
    """Train a model, unless it is there; return its folder."""
    run_folder = folder / "runs" / name
    if not (run_folder / "model").exists():
        recipe_flags = flags(block_size=LENGTH, optim="muon", **STEPS_ONLY, **values)
        command = [sys.executable, recipe, *recipe_flags, *new_run_flags(run_folder)]
        run(command, LLMTRAIN_CACHE=str(folder / "cache"))
    return run_folder / "model"


def trained_models(folder: Path) -> tuple[Path, Path]:
    """Return the teacher, which has seen the answers, and the student, which has not."""
    pretrained = {
        role: train(
            folder,
            name,
            FINETUNE_RECIPE,
            model_name_or_path=folder / f"random-{role}",
            dataset=folder / f"{role}.jsonl",
            learning_rate=1e-2,
            max_steps=steps,
        )
        for role, name, steps in (
            ("teacher", "pretrained-teacher", 200),
            ("student", "student", 100),
        )
    }
    # Texts have no special tokens, so the teacher does not know yet how an answer ends.
    teacher = train(
        folder,
        "teacher",
        FINETUNE_RECIPE,
        model_name_or_path=pretrained["teacher"],
        dataset=folder / "all.jsonl",
        learning_rate=5e-3,
        max_steps=60,
    )
    return teacher, pretrained["student"]


# --- quality


def scored_rows(folder: Path, data: str) -> Path:
    """Write the teacher's 64 likeliest tokens to rows, unless they are there; return their folder."""
    rows = folder / f"{data}-scored"
    if not rows.exists():
        teacher, student = trained_models(folder)
        scoring = flags(
            model_name_or_path=student,
            teacher_model_name_or_path=teacher,
            loss_top_k=64,
            dataset=folder / f"{data}.jsonl",
            block_size=LENGTH,
            eval_fraction=0,
            to=rows,
        )
        run([sys.executable, "-m", "llmtrain", "tokenize", DISTILL_RECIPE, *scoring])
    return rows


def trained_student(folder: Path, data: str, method: str, seed: int) -> Path:
    """Train the student by a method; return the folder of its model."""
    teacher, student = trained_models(folder)
    rate = LEARNING_RATES[data, method]
    values: dict[str, object] = {"dataset": folder / f"{data}.jsonl"}
    if method.startswith("live"):
        values["teacher_model_name_or_path"] = teacher
    if method.startswith("offline"):
        values["dataset"] = scored_rows(folder, data)
    if method.endswith("half"):
        values["sft_share"] = 0.5
    return train(
        folder,
        f"{method}-{data}-{rate}-{seed}",
        FINETUNE_RECIPE if method == "sft" else DISTILL_RECIPE,
        model_name_or_path=student,
        max_steps=STEPS,
        learning_rate=rate,
        seed=seed,
        **values,
    )


class Answers:
    """The target tokens of the eval conversations.

    Args:
        folder: with the conversations.
        model: with the tokenizer.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.chats: list[tuple[Tensor, int]] = []  # the tokens, and how many are the prompt
        for line in (folder / "eval.jsonl").read_text().splitlines():
            chat = json.loads(line)["messages"]
            prompt = tokenizer.apply_chat_template(
                chat[:-1], add_generation_prompt=True, return_dict=False
            )
            # The line break after the answer is no target.
            ids = tokenizer.apply_chat_template(chat, return_dict=False)[:-1]
            self.chats.append((torch.tensor(ids), len(prompt)))
        self.targets = torch.cat([ids[length:] for ids, length in self.chats])

    @torch.no_grad()
    def log_probabilities(self, folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return log-probabilities [N, V] of a model, for all N targets."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        parts = []
        for ids, prompt_length in self.chats:
            logits = model(ids[None]).logits[0, prompt_length - 1 : -1]
            parts.append(logits.log_softmax(1))
        return torch.cat(parts)

    def nll(self, log_probabilities: Tensor) -> float:
        return -log_probabilities.gather(1, self.targets[:, None]).mean().item()


def measure_quality(folder: Path) -> None:
    teacher, student = trained_models(folder)
    answers = Answers(folder, teacher)
    log_p = answers.log_probabilities(teacher)
    details: dict[str, Any] = {
        "teacher": answers.nll(log_p),
        "student": answers.nll(answers.log_probabilities(student)),
    }
    table = Table("distill_quality")
    for (data, method), rate in LEARNING_RATES.items():
        students = [trained_student(folder, data, method, seed) for seed in SEEDS]
        log_qs = [answers.log_probabilities(model) for model in students]
        nlls = [answers.nll(log_q) for log_q in log_qs]
        divergences = [generalized_jsd(log_p, log_q, beta=0).mean().item() for log_q in log_qs]
        details[f"{data}: {method}"] = {
            "nll": nlls,
            "interval": stats.t.ppf(0.975, len(nlls) - 1) * stats.sem(nlls),
            "divergence": statistics.mean(divergences),
            "learning_rate": rate,
        }
        table.add(
            work=f"{data} of the answers: {method}",
            against="sft",
            ours=statistics.mean(nlls),
            theirs=statistics.mean(details[f"{data}: sft"]["nll"]),
            unit="nats",
        )
    table.write(**details)


# --- top_k


def measure_top_k(folder: Path) -> None:
    teacher, _ = trained_models(folder)
    student = trained_student(folder, "all", "sft", seed=0)
    answers = Answers(folder, teacher)
    log_p = answers.log_probabilities(teacher, torch.float64)
    log_q = answers.log_probabilities(student, torch.float64)
    full_kl = generalized_jsd(log_p, log_q, 0).mean().item()

    table = Table("distill_top_k")
    details = {}
    for k in (*TOP_K, log_p.shape[1]):
        largest, ids = log_p.topk(k)
        rest = (1 - largest.exp().sum(1)).clamp(min=1e-300).log()
        bounds = []
        for stored, stored_rest in ((largest, rest), (largest.half(), rest.float())):
            outcomes = top_k_outcomes(log_q, ids, stored.double(), stored_rest.double())
            bounds.append(generalized_jsd(*outcomes, 0).mean().item())
        left_out = rest.exp().mean().item()
        details[k] = {"exact": bounds[0], "stored": bounds[1], "left_out": left_out}
        table.add(
            work=f"forward KL, k = {k}",
            against="whole vocabulary",
            ours=bounds[1],
            theirs=full_kl,
            unit="nats",
        )
    table.write(outcomes=details)


TABLES = {"quality": measure_quality, "top_k": measure_top_k}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="all by default")
    parser.add_argument("--folder", type=Path, help="keeps the models")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.tables) - set(TABLES))
    if unknown:
        parser.error(f"no table {', '.join(unknown)}: there are {' '.join(TABLES)}")
    with scratch() as temporary:
        folder = arguments.folder or temporary
        if not (folder / "eval.jsonl").exists():
            write_inputs(folder)
        for name in arguments.tables or TABLES:
            TABLES[name](folder)


if __name__ == "__main__":
    main()
