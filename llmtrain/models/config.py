"""Settings of this package's GPT and of Hugging Face models.

:func:`llmtrain.config.flags.flag` explains ``affects`` and its values.
"""

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from llmtrain.config.flags import Affects, Config, flag, require_range
from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.files import local_path
from llmtrain.model_folders import (
    check_model_files,
    has_tokenizer,
    is_adapter,
    is_of_checkpoint,
    model_folder,
)
from llmtrain.models.configuration import (
    MAX_LAYERS,
    is_model_type,
    new_configuration,
    parse_overrides,
    refuse_hub_attention,
)
from llmtrain.planning import current_plan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

# A slip of the finger would otherwise overflow a number.
_MAX_WIDTH = 1_000_000
_MAX_ROW_LENGTH = 100_000_000
_RECOMPUTATION = (
    "save memory: recompute activations in the backward pass instead of keeping them; auto: "
    "if the memory of a GPU makes it necessary; never on a CPU, whose memory other programs share, "
    "and never with --bitwise"
)


@dataclass
class GPTConfig(Config):
    """The size of a GPT. Each field is a flag."""

    group: ClassVar[str] = "model"
    affects: ClassVar[Affects] = "numbers"
    row_length_flag: ClassVar[str] = "block_size"

    n_layer: int = flag(4, "number of transformer blocks")
    n_head: int = flag(4, "attention heads per block; must divide --n_embd")
    n_embd: int = flag(256, "embedding size, the width of the residual stream")
    block_size: int = flag(
        128,
        "context length of the model, and the length of a row, in tokens",
        affects="data",
        alias="max_length",  # the name in recipes/finetune.py
    )
    dropout: float = flag(
        0.0,
        "dropout probability, after the embedding and in each residual branch",
        affects="numbers",
    )
    gradient_checkpointing: bool | None = flag(
        False,
        _RECOMPUTATION,
        affects="nothing",
        group="batch and memory",
    )
    architecture: Literal["gpt2", "lfm2"] = flag(
        "gpt2",
        "transformers class that can load the finished model: gpt2 is the simplest to study, lfm2 "
        "learns faster",
    )

    def __post_init__(self) -> None:
        require_range(self, "n_layer", at_least=1, at_most=MAX_LAYERS)
        require_range(self, "n_head", at_least=1)
        require_range(self, "n_embd", at_least=1, at_most=_MAX_WIDTH)
        require_range(self, "block_size", at_least=1, at_most=_MAX_ROW_LENGTH)
        require_range(self, "dropout", at_least=0, below=1)
        if self.n_embd % self.n_head:
            next_multiple = -(-self.n_embd // self.n_head) * self.n_head
            raise UserError(
                f"--n_head {self.n_head} does not divide --n_embd {self.n_embd}; use a divisor, or "
                f"--n_embd {next_multiple}."
            )


def parse_max_length(text: str) -> int | Literal["auto"]:
    """Parse the value of ``--max_length``."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise UserError(f"'{text}' is neither a number of tokens nor auto") from None


def _model_of_run(name: str | None, flag_name: str) -> str | None:
    """Return the model folder that a name refers to, if it is the folder of a run or a checkpoint.

    Args:
        name: the value of the flag.
        flag_name: the name of the flag.

    Raises:
        UserError: if the folder holds no model, or if the name is an address.
    """
    if name is None:
        return None
    if not Path(name).is_dir():
        return local_path(name, f"--{flag_name} ")
    try:
        folder = model_folder(name)
    except UserError as error:
        raise UserError(f"--{flag_name} {error}") from None
    names_checkpoint = is_of_checkpoint(Path(name, "model"))
    if folder != name and is_of_checkpoint(Path(folder)) and not names_checkpoint:
        say("model", f"{folder} (the newest checkpoint: the run has no finished model)")
    return folder


@dataclass
class ModelConfig(Config):
    """The Hugging Face model to train and its initial weights. Each field is a flag."""

    group: ClassVar[str] = "model"
    affects: ClassVar[Affects] = "numbers"
    row_length_flag: ClassVar[str] = "max_length"

    model_name_or_path: str | None = flag(
        None,
        "causal LM to start from: the folder of a run, a checkpoint or a model, or a hub name; a "
        "LoRA adapter is merged into its base first, unless --continue_adapter is given",
    )
    continue_adapter: bool = flag(
        False,
        "train the LoRA adapter of --model_name_or_path itself further, with its own rank and "
        "modules, instead of merging it",
        hidden=True,
        group="LoRA",
    )
    model_revision: str = flag(
        "main",
        "branch, tag or commit of the hub model in --model_name_or_path, also for its tokenizer",
        hidden=True,
    )
    from_config: str | None = flag(
        None,
        "start from random weights instead: a model type such as llama, qwen3 or gpt2 (a small "
        "model), or a run, a model folder or a hub name whose configuration to use",
    )
    config_overrides: str | None = flag(
        None,
        "changes to the configuration of --from_config, such as "
        '"hidden_size=256,num_hidden_layers=8"; head_dim follows from the hidden size and the '
        "heads, unless it is given or the model type has its own",
        hidden=True,
    )
    max_length: int | Literal["auto"] = flag(
        1024,
        "longest conversation, or answer with its prompt, in tokens (see --overlong for longer "
        "ones), and at most the model's positions; auto: long enough for 99.5 % of the "
        "conversations; plain text is cut into rows of this length",
        affects="data",
        parse=parse_max_length,
        alias="block_size",  # the name in recipes/gpt.py
    )
    attn_implementation: str | None = flag(
        None,
        "attention of transformers: sdpa, eager, flash_attention_2, ..., or with "
        "--trust_remote_code a compiled kernel of the hub, ORG/NAME@COMMIT (default: the model's "
        "own)",
        affects="numbers",
        hidden=True,
    )
    gradient_checkpointing: bool | None = flag(
        None,
        f"{_RECOMPUTATION} (default: auto)",
        affects="nothing",
        group="batch and memory",
    )
    freeze: str | None = flag(
        None,
        "regular expression; parameters whose names contain a match are not trained",
        hidden=True,
    )
    load_in_4bit: bool = flag(
        False,
        "with --lora_r: keep the frozen weights in 4 bits to save memory (needs a CUDA GPU and "
        "bitsandbytes)",
        group="batch and memory",
    )
    trust_remote_code: bool = flag(
        False,
        "run code that comes with the model, the tokenizer or a kernel of --attn_implementation; "
        "only if you trust its author",
        hidden=True,
    )

    def __post_init__(self) -> None:
        if self.max_length != "auto":
            require_range(self, "max_length", at_least=2, at_most=_MAX_ROW_LENGTH)
        attention = self.attn_implementation or ""
        is_kernel_of_hub = "/" in attention
        if is_kernel_of_hub and not self.trust_remote_code:
            raise UserError(
                f"--attn_implementation {attention} is a program on the hub, which would be "
                "downloaded and run; add --trust_remote_code if you trust its author."
            )
        if is_kernel_of_hub and not re.search(r"@[0-9a-f]{40}(:|$)", attention):
            raise UserError(
                f"--attn_implementation {attention}: name its commit as well, ORG/NAME@COMMIT with "
                "40 hexadecimal digits; otherwise a resumed run might compute something else."
            )
        self.resolve_runs()
        try:
            re.compile(self.freeze or "")
        except re.error as error:
            raise UserError(
                f"--freeze '{self.freeze}' is not a regular expression: {error}."
            ) from None
        if self.continue_adapter and not self.model_name_or_path:
            raise UserError("--continue_adapter needs --model_name_or_path: name the adapter.")
        parse_overrides(self.config_overrides or "")
        if self.config_overrides and self.model_name_or_path:
            raise UserError(
                "--config_overrides is for --from_config: the weights of --model_name_or_path fit "
                "only their own configuration."
            )

    def resolve_runs(self) -> None:
        """Let the names of runs and checkpoints refer to their model folders.

        A program may set these fields after the config is made, so those who read them call this.
        """
        self.model_name_or_path = _model_of_run(self.model_name_or_path, "model_name_or_path")
        name = self.model_name_or_path
        is_of_hub = name is not None and not Path(name).is_dir()
        is_named = name is not None or self.from_config is not None
        if self.model_revision != "main" and is_named and not is_of_hub:
            raise UserError(
                f"--model_revision {self.model_revision} is for a model of the hub in "
                f"--model_name_or_path, and {name or self.from_config} is none; leave it out."
            )
        # Only a folder takes the time to import the types of transformers.
        is_folder = self.from_config is not None and Path(self.from_config).is_dir()
        if is_folder and not is_model_type(str(self.from_config)):
            self.from_config = _model_of_run(self.from_config, "from_config")

    @property
    def tokenizer_name(self) -> str | None:
        """The model's own tokenizer, as ``--tokenizer`` names it; ``None`` without a model.

        An adapter has its own, unless another program has saved it alone.
        """
        adapter = self.adapter
        if adapter is not None and not has_tokenizer(adapter):
            return self.of_base().tokenizer_name
        if self.model_name_or_path is None or self.model_revision == "main":
            return self.model_name_or_path
        return f"{self.model_name_or_path}@{self.model_revision}"

    def configuration(
        self, tokenizer: "PreTrainedTokenizerFast | None" = None
    ) -> "PreTrainedConfig":
        """Return the configuration of the model to train.

        It also raises whatever transformers raises.

        Args:
            tokenizer: its size is the vocabulary of a model with random weights. Without it, such a
                model has the vocabulary of its class.

        Raises:
            UserError: if the model cannot be used.
        """
        from transformers import AutoConfig

        name = str(self.model_name_or_path or self.from_config)
        if self.model_name_or_path is None:
            loaded = new_configuration(
                name,
                overrides=parse_overrides(self.config_overrides or ""),
                # Until `auto` is known, there is no limit.
                row_length=_MAX_ROW_LENGTH if self.max_length == "auto" else self.max_length,
                tokenizer=tokenizer,
                trust_remote_code=self.trust_remote_code,
            )
        else:
            check_model_files(Path(name))
            if is_adapter(Path(name)):
                raise UserError(
                    f"--model_name_or_path {name} is an adapter; merge it into its model first: "
                    f"llmtrain export {name} --merge --to FOLDER."
                )
            loaded = AutoConfig.from_pretrained(
                name, revision=self.model_revision, trust_remote_code=self.trust_remote_code
            )
        for part in [loaded, *(getattr(loaded, key, None) for key in loaded.sub_configs)]:
            layers = getattr(part, "num_hidden_layers", 0)
            if isinstance(layers, int) and layers > MAX_LAYERS:
                raise UserError(
                    f"the configuration of {name} has {layers:,} layers, and a model can have at "
                    f"most {MAX_LAYERS:,}; correct num_hidden_layers."
                )
        if not self.attn_implementation:
            refuse_hub_attention(loaded, name)
        return loaded

    def known_configuration(self) -> "PreTrainedConfig | None":
        """Return the configuration of the model, or ``None`` if it cannot be loaded.

        Loading the model reports what is wrong with it.
        """
        try:
            return self.configuration()
        except Exception:
            return None

    def max_positions(self) -> int | None:
        """Return the number of positions of the model; ``None`` if there is no limit.

        A model type in ``--from_config`` gets as many positions as its rows need, unless
        ``--config_overrides`` sets their number.
        """
        config = self.with_values({"max_length": "auto"}).known_configuration()
        if config is None:
            return None
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        return int(positions) if positions and positions < _MAX_ROW_LENGTH else None

    def fit_max_length(self) -> None:
        """Merge an adapter into its base, and fit the default ``max_length`` to the model.

        The merged model is used, unless the adapter itself is trained further. The name of a run
        becomes that of its model folder. The default is lowered to the positions of the model.
        """
        self.resolve_runs()
        if not self.continue_adapter:
            self.merge_adapter()
        if self.max_length == "auto":
            return
        positions = self.of_base().max_positions()
        if positions and positions < self.max_length:
            self.set_default("max_length", positions, f"a model with {positions} positions")

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapter to train further, if there is one.

        Raises:
            UserError: if the model is not an adapter.
        """
        if not self.continue_adapter:
            return None
        folder = Path(str(self.model_name_or_path))
        if not folder.is_dir():
            raise UserError(
                f"--continue_adapter: {folder} is not a folder; download the adapter, and name its "
                f"folder: hf download {folder} --local-dir FOLDER."
            )
        if not is_adapter(folder):
            raise UserError(
                f"--continue_adapter: {folder} is not the folder of an adapter; leave the flag out "
                "to train this model, or use --lora_r for a new adapter of it."
            )
        return folder

    def of_base(self) -> "ModelConfig":
        """Return a config that names the base of the adapter to train further, if there is one."""
        adapter = self.adapter
        if adapter is None:
            return self
        from llmtrain.models.adapters import base_of

        config = copy.copy(self)
        config.model_name_or_path, config.model_revision = base_of(adapter)
        config.continue_adapter = False
        return config

    def merge_adapter(self) -> None:
        """Let ``model_name_or_path`` name the merged model, if it names an adapter."""
        name = self.model_name_or_path
        if name is not None and is_adapter(Path(name)):
            from llmtrain.models.adapters import merged_model, write_outline

            plan = current_plan()
            if plan is not None:  # only the shapes of the model matter
                self.model_name_or_path = write_outline(Path(name), plan.folder)
            else:
                self.model_name_or_path = merged_model(Path(name))
