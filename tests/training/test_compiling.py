"""Whether a model's blocks are compiled, and that nothing else changes by it."""

import shutil

import pytest
import torch
from accelerate import Accelerator

from llmtrain.errors import UserError
from llmtrain.models.gpt import GPT, GPTConfig
from llmtrain.training import compiling
from llmtrain.training.compiling import choose, eager_code
from tests.launching import long_form

IDS = torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
MANY = 10**9


def gpt() -> GPT:
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16), vocab_size=50)


def is_compiled(model: GPT) -> bool:
    return all(block._compiled_call_impl is not None for block in model.transformer.h)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes no time."""

    def compile_quickly(model: GPT) -> None:
        for block in model.transformer.h:
            block.compile(backend="eager")

    monkeypatch.setattr(compiling, "_compile", compile_quickly)


def times(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    following = iter(seconds)
    monkeypatch.setattr(compiling, "_seconds", lambda *_: next(following))


@pytest.mark.usefixtures("compiler")
def test_a_run_is_compiled_where_it_is_long_and_gains(accelerator: Accelerator, monkeypatch, capsys) -> None:
    for passes, before, after, expected in [(100, 1.0, 0.5, False), (400, 1.0, 0.5, True), (400, 1.0, 0.99, False)]:
        model = gpt()
        times(monkeypatch, before, after)
        assert choose(accelerator, model, BATCH, passes, "auto", None) == is_compiled(model) == expected
    assert "a micro-batch takes 0.50x its time before" in capsys.readouterr().out


@pytest.mark.usefixtures("compiler")
def test_a_run_stays_with_what_it_has_chosen(accelerator: Accelerator) -> None:
    for earlier in (True, False):
        model = gpt()
        assert choose(accelerator, model, BATCH, MANY, "auto", earlier) == is_compiled(model) == earlier
    for wanted in ("always", "never"):
        model = gpt()
        assert choose(accelerator, model, BATCH, 1, wanted, None) == is_compiled(model) == (wanted == "always")


def test_without_a_compiler_a_run_goes_on_unless_it_was_asked_for(
    accelerator: Accelerator, monkeypatch, capsys
) -> None:
    def break_blocks(model: GPT) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("no C++ compiler\nand more")

        for block in model.transformer.h:
            block._compiled_call_impl = fail

    monkeypatch.setattr(compiling, "_compile", break_blocks)
    monkeypatch.setattr(compiling, "_WORTH_SECONDS", 0.0)
    model = gpt()
    assert not choose(accelerator, model, BATCH, MANY, "auto", None)
    assert not is_compiled(model)
    assert "no C++ compiler" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"torch.compile does not work here: no C\+\+ compiler\. Leave it out"):
        choose(accelerator, gpt(), BATCH, MANY, "always", None)


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
    choose(accelerator, model, BATCH, MANY, "auto", None)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=long_form)])
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler")
def test_compiled_blocks_compute_what_they_computed(backend: str, accelerator: Accelerator, monkeypatch) -> None:
    eager, model = gpt(), gpt()
    if backend != "inductor":  # which alone takes most of a minute

        def compile_without_code(model: GPT) -> None:
            for block in model.transformer.h:
                block.compile(backend=backend, dynamic=False)

        monkeypatch.setattr(compiling, "_compile", compile_without_code)
    assert choose(accelerator, model, BATCH, 1, "always", None)
    for network in (eager, model):
        network(**BATCH).backward()
    for (name, one), other in zip(eager.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in eager.named_parameters()]
    with torch.no_grad(), eager_code(True):
        assert torch.equal(model(**BATCH), eager(**BATCH))
