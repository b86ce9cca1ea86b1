"""The fingerprint of a run: everything that its steps depend on."""

from accelerate import Accelerator

from llmtrain.config.flags import settings_fingerprint
from llmtrain.data.tokenized import Tokenized
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.json_types import JsonObject
from llmtrain.seeds import RANDOM_VERSION
from llmtrain.training.layout import Layout
from llmtrain.training.learning_rates import LearningRates
from llmtrain.training.parts import Parts
from llmtrain.training.settings import Settings


def run_fingerprint(
    accelerator: Accelerator,
    settings: Settings,
    rows: Tokenized,
    bundle: ModelBundle,
    parts: Parts,
    rates: LearningRates,
    layout: Layout,
) -> JsonObject:
    """Return everything that a run's steps depend on, as a JSON object.

    A run resumes from a checkpoint only if the fingerprints match. If the user names the
    checkpoint, the keys in :data:`llmtrain.record.resume.MAY_CHANGE` may differ. The parallel
    layout is not part of the fingerprint, except with ``--bitwise``: its bits depend on the layout.
    """
    stopping = None
    if settings.eval.keeps_best:
        stopping = [
            settings.eval.early_stopping_patience,
            settings.eval.metric_for_best_model,
            settings.eval.eval_steps,
        ]

    return {
        "model": bundle.files.config,
        "initial_weights": bundle.start,
        "random": RANDOM_VERSION,
        "data": rows.metadata.data_sha256,
        "mixture": [] if rows.mixture is None else rows.mixture.weights,
        "tokenizer": rows.metadata.tokenizer_sha256,
        "block_size": rows.metadata.block_size,
        "global_batch_size": settings.data.global_batch_size,
        "seed": settings.optim.seed,
        "bitwise": layout.bitwise_fingerprint(accelerator) if settings.parallel.bitwise else None,
        "optimizer": {**settings.optim.fingerprint, **parts.optimizer_fingerprint()},
        "learning_rates": rates.fingerprint,
        **parts.fingerprint(),
        "gradient_exchange": settings.parallel.approximation,
        "order": rows.order,
        "early_stopping": stopping,
        "own_settings": settings_fingerprint(settings),
    }
