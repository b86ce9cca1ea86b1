"""Whether a model's blocks are compiled, and that nothing else changes by it."""

import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.models.gpt import GPT
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.placement import place
from llmtrain.training import compiling
from llmtrain.training.compiling import choose_compiled_or_eager, eager_code
from tests.engines import engine_of
from tests.launching import long_form
from tests.models.some_rows import SomeRows

IDS = torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
MANY = 10**9


def gpt() -> GPT:
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16), vocab_size=50)


def is_compiled(model: GPT) -> bool:
    return all("forward" in vars(block) for block in model.transformer.h)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes no time."""

    monkeypatch.setattr(
        compiling, "_compile", functools.partial(compiling._compile, backend="eager")
    )


def times(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    following = iter(seconds)
    monkeypatch.setattr(compiling, "_seconds_per_micro_batch", lambda *_: next(following))


@pytest.mark.usefixtures("compiler")
def test_a_run_is_compiled_where_it_is_long_and_gains(
    accelerator: Accelerator, monkeypatch, capsys
) -> None:
    for passes, before, after, expected in [
        (100, 1.0, 0.5, False),
        (400, 1.0, 0.5, True),
        (400, 1.0, 0.99, False),
    ]:
        model = gpt()
        times(monkeypatch, before, after)
        choice = choose_compiled_or_eager(
            engine_of(accelerator, model), BATCH, passes=passes, mode="auto", earlier_choice=None
        )
        assert choice == is_compiled(model) == expected
    assert "a micro-batch takes 0.50x its time before" in capsys.readouterr().out


@pytest.mark.usefixtures("compiler")
def test_a_run_stays_with_what_it_has_chosen(accelerator: Accelerator) -> None:
    for earlier in (True, False):
        model = gpt()
        choice = choose_compiled_or_eager(
            engine_of(accelerator, model), BATCH, passes=MANY, mode="auto", earlier_choice=earlier
        )
        assert choice == is_compiled(model) == earlier
    for wanted in ("always", "never"):
        model = gpt()
        choice = choose_compiled_or_eager(
            engine_of(accelerator, model), BATCH, passes=1, mode=wanted, earlier_choice=None
        )
        assert choice == is_compiled(model) == (wanted == "always")


def test_without_a_compiler_a_run_goes_on_unless_it_was_asked_for(
    accelerator: Accelerator, monkeypatch, capsys
) -> None:
    def break_blocks(model: GPT) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("no C++ compiler\nand more")

        for block in model.transformer.h:
            block.forward = fail

    monkeypatch.setattr(compiling, "_compile", break_blocks)
    monkeypatch.setattr(compiling, "_MIN_REMAINING_SECONDS", 0.0)
    model = gpt()
    engine = engine_of(accelerator, model)
    assert not choose_compiled_or_eager(
        engine, BATCH, passes=MANY, mode="auto", earlier_choice=None
    )
    assert not is_compiled(model)
    assert "no C++ compiler" in capsys.readouterr().out
    with pytest.raises(
        UserError, match=r"torch.compile does not work here: no C\+\+ compiler; use --torch"
    ):
        choose_compiled_or_eager(
            engine_of(accelerator, gpt()), BATCH, passes=MANY, mode="always", earlier_choice=None
        )


@pytest.mark.usefixtures("compiler")
def test_trying_it_leaves_no_trace(accelerator: Accelerator) -> None:
    model = gpt()

    def draws(*_: object) -> None:  # as a model's own dropout does
        torch.rand(1)

    model.register_forward_hook(draws)
    before = [p.clone() for p in model.parameters()]
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    choose_compiled_or_eager(
        engine_of(accelerator, model), BATCH, passes=MANY, mode="auto", earlier_choice=None
    )
    assert torch.equal(torch.rand(3), expected)
    assert all(
        torch.equal(a, b) and b.grad is None
        for a, b in zip(before, model.parameters(), strict=True)
    )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=long_form)])
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)
def test_compiled_blocks_compute_what_they_computed(
    backend: str, accelerator: Accelerator, monkeypatch
) -> None:
    eager, model = gpt(), gpt()
    if backend != "inductor":  # which alone takes most of a minute
        monkeypatch.setattr(
            compiling, "_compile", functools.partial(compiling._compile, backend=backend)
        )
    engine = engine_of(accelerator, model)
    assert choose_compiled_or_eager(engine, BATCH, passes=1, mode="always", earlier_choice=None)
    for network in (eager, model):
        network(**BATCH).backward()
    for (name, one), other in zip(eager.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in eager.named_parameters()
    ]
    with torch.no_grad(), eager_code(model):
        assert torch.equal(model(**BATCH), eager(**BATCH))


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """The graphs that are compiled."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def counting(graphs: list[Any]) -> Callable[..., Any]:
    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


def test_all_blocks_are_one_graph_and_stay_it(graphs: list[Any]) -> None:
    model = GPT(
        GPTConfig(n_layer=12, n_head=2, n_embd=16, block_size=16, dropout=0.2), vocab_size=50
    ).train()
    compiling._compile(model, counting(graphs))
    for update in range(20):
        for key in range(2):
            model(**BATCH, dropout_keys=torch.arange(3) * 2**40 + update * 2 + key).backward()
    assert len(graphs) == 1


def test_packed_rows_are_one_graph_wherever_documents_begin(graphs: list[Any]) -> None:
    tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)
    rows = SomeRows(tokenizer, is_packed=True)
    config = ModelConfig(from_config="llama", max_length=64)
    accelerator = Accelerator(cpu=True)
    bundle = place(accelerator, load_model(config, None, rows, 0, "no"))
    model = bundle.model.train()
    compiling._compile(model, counting(graphs))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        border = int(torch.randint(2, 60, (), generator=generator))
        positions = torch.cat([torch.arange(border), torch.arange(65 - border)]).expand(2, -1)
        ids = torch.randint(200, (2, 65), generator=generator)
        labels = torch.where(torch.rand(2, 65, generator=generator) < 0.5, ids, -100)
        batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
        model(**batch, **bundle.prepare_batch(batch)).backward()
    assert len(graphs) == 1


@pytest.fixture
def recompile_limit() -> Iterator[None]:
    """Restore torch's own limit after the test."""
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.config.recompile_limit = limit


@pytest.mark.usefixtures("recompile_limit")
def test_every_shape_of_trimmed_rows_is_compiled(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, graphs: list[Any]
) -> None:
    """By default torch compiles eight shapes, and runs eager code for all others."""
    monkeypatch.setattr(
        compiling, "_compile", functools.partial(compiling._compile, backend=counting(graphs))
    )
    widths = range(6, 18)
    engine = engine_of(accelerator, gpt())
    choose_compiled_or_eager(
        engine, BATCH, passes=1, mode="always", earlier_choice=None, shapes=len(widths)
    )
    for _ in range(2):
        for width in widths:
            engine.loss({name: column[:, :width] for name, column in BATCH.items()}).loss.backward()
    assert len(graphs) == len(widths)


@pytest.mark.usefixtures("compiler", "recompile_limit")
@pytest.mark.parametrize(("shapes", "expected"), [(1, True), (4, True), (5, False)])
def test_a_run_with_many_shapes_must_be_longer_to_be_compiled(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, shapes: int, expected: bool
) -> None:
    times(monkeypatch, 1.0, 0.5)
    choice = choose_compiled_or_eager(
        engine_of(accelerator, gpt()),
        BATCH,
        passes=1400,
        mode="auto",
        earlier_choice=None,
        shapes=shapes,
    )
    assert choice == expected


def test_trying_it_leaves_other_devices_alone(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked: list[Any] = []
    honest = torch.random.fork_rng
    monkeypatch.setattr(
        torch.random, "fork_rng", lambda *devices: forked.append(devices) or honest(*devices)
    )
    compiling._try(engine_of(accelerator, gpt()), BATCH)
    assert forked == [([],)]  # without a list it is every GPU of the machine
