"""Train the model of recipes/gpt.py twice: undisturbed, and killed five times.

The first run trains on one process. All processes of the second run are killed (SIGKILL) at random
steps. The same command then starts it again on another number of processes. Both use the CPU.

The program prints the kills and the losses of both runs, and then what ``llmtrain diff`` prints. It
draws docs/images/kills.svg.

Repeat it with `pip install 'llmtrain[bench]'` and `python -m benchmarks.kills`. It takes some
minutes on two cores. `--help` lists its flags; it passes all others to the recipe.
"""

import argparse
import importlib.util
import itertools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.runs import BIN, GPT_RECIPE, ROOT, environment, flags, run, scratch
from llmtrain.launching.children import launcher_command, start_command
from llmtrain.record.history import History

PICTURE = ROOT / "docs/images/kills.svg"


class Kill(NamedTuple):
    """A kill of all processes.

    Attributes:
        step: the last step that the run had logged.
        resumed_from: the step of the checkpoint from which the next start resumed.
        before: the number of processes that were killed.
        after: the number of processes that resumed.
    """

    step: int
    resumed_from: int
    before: int
    after: int


def main() -> int:
    """Train both runs, and compare them; return the exit status of ``llmtrain diff``."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=240, help="steps of each run")
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        default=[2, 1, 4, 3, 1, 2],
        help="processes of each start of the second run; all starts but the last are killed",
    )
    parser.add_argument("--kill_seed", type=int, default=0, help="seed of the random steps")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="the SVG file to write")
    arguments, recipe_flags = parser.parse_known_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("matplotlib draws the picture: pip install 'llmtrain[bench]'.")

    steps = arguments.steps
    save_steps = max(1, steps // 30)
    fixed_flags = flags(
        global_batch_size=24,  # 1, 2, 3 and 4 processes divide it
        max_steps=steps,
        save_steps=save_steps,
        logging_steps=1,
        log_rows=True,
        threads=1,
        report_to="none",
    )
    with scratch() as folder:
        undisturbed = folder / "undisturbed"
        killed = folder / "killed"
        command = [str(ROOT / GPT_RECIPE), *fixed_flags, *recipe_flags, "--output_dir"]
        run([*launcher_command(1, None), *command, undisturbed], ACCELERATE_USE_CPU="true")
        kills = train_and_kill(
            [*command, str(killed)],
            killed,
            processes=arguments.processes,
            kill_steps=random_steps(
                steps,
                kills=len(arguments.processes) - 1,
                save_steps=save_steps,
                seed=arguments.kill_seed,
            ),
        )

        losses = History.of_run(undisturbed).series("train/loss")
        killed_losses = History.of_run(killed).series("train/loss")
        print_table(losses, killed_losses, kills)
        draw(losses, killed_losses, kills, arguments.picture)
        sys.stdout.flush()
        diff = [BIN / "llmtrain", "diff", undisturbed.name, killed.name]
        return subprocess.run(diff, cwd=folder, env=environment(), check=False).returncode


# The run that is killed


def random_steps(steps: int, *, kills: int, save_steps: int, seed: int) -> list[int]:
    """Return the steps at which to kill: one in each share of the run, after a new checkpoint."""
    generator = random.Random(seed)
    borders = [steps * share // (kills + 1) for share in range(kills + 1)]
    return [
        generator.randint(start + save_steps + 1, end) for start, end in itertools.pairwise(borders)
    ]


def train_and_kill(
    command: list[str], folder: Path, *, processes: list[int], kill_steps: list[int]
) -> list[Kill]:
    """Start a run on each number of processes, and kill all starts but the last.

    Args:
        command: the recipe and its flags.
        folder: the run folder.
        processes: the number of processes of each start.
        kill_steps: the step at which each start but the last is killed.
    """
    log = folder.parent / "stderr"
    reached_steps = []
    for count, step in zip(processes, kill_steps, strict=False):
        launch = [*launcher_command(count, None), *command]
        # The end of the block kills all processes.
        with (
            log.open("wb") as stderr,
            start_command(launch, True, stderr, **environment()) as process,
        ):
            while process.poll() is None and last_step(folder) < step:
                time.sleep(0.005)
        if process.returncode != -signal.SIGKILL:
            raise SystemExit(f"the run ended before it was killed:\n{log.read_text()}")
        reached_steps.append(last_step(folder))
    run([*launcher_command(processes[-1], None), *command], ACCELERATE_USE_CPU="true")

    starts = History.of_run(folder).starts
    first_steps = [start["step"] for start in starts]
    if len(starts) != len(processes) or 0 in first_steps[1:]:
        raise SystemExit(f"a start did not resume: they began at the steps {first_steps}")
    return [
        Kill(step=step, resumed_from=start["step"], before=before, after=after)
        for step, start, before, after in zip(
            reached_steps, starts[1:], processes, processes[1:], strict=False
        )
    ]


def last_step(folder: Path) -> int:
    """Return the last step that a run has logged; 0 if there is none."""
    return History.read(folder).step if folder.exists() else 0


# The table and the picture


def print_table(losses: dict[int, float], killed: dict[int, float], kills: list[Kill]) -> None:
    """Print the kills, and the losses of both runs at ten steps."""
    for kill in kills:
        print(
            f"step {kill.step:>5}  killed on {kill.before}, "
            f"resumed on {kill.after} from step {kill.resumed_from}"
        )
    print(f"{'step':>10}{'undisturbed':>14}{'killed':>14}{'difference':>12}")
    for step in list(losses)[:: -max(1, len(losses) // 10)][::-1]:
        difference = abs(losses[step] - killed[step])
        print(f"{step:>10}{losses[step]:>14.8f}{killed[step]:>14.8f}{difference:>12.1e}")


def draw(
    losses: dict[int, float], killed: dict[int, float], kills: list[Kill], picture: Path
) -> None:
    """Draw both losses with a mark at each kill, and their difference below."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "llmtrain",  # equal figures make an equal file
            "svg.fonttype": "none",  # text stays text
            "font.family": "sans-serif",
            "font.size": 12,
        }
    )
    figure, (loss_axes, difference_axes) = pyplot.subplots(
        2, 1, figsize=(7, 5.6), height_ratios=(3, 1), sharex=True, layout="constrained"
    )
    steps = list(losses)
    # The two curves lie on each other.
    undisturbed = {"color": "#9ecae1", "linewidth": 7, "label": "undisturbed, on 1 process"}
    loss_axes.plot(steps, list(losses.values()), **undisturbed)
    resumed = {"color": "#08306b", "label": f"killed {len(kills)} times and resumed"}
    loss_axes.plot(steps, [killed[step] for step in steps], **resumed)
    differences = [1e6 * (killed[step] - losses[step]) for step in steps]
    difference_axes.plot(steps, differences, color="#08306b")

    kill_steps = [kill.step for kill in kills]
    mark = {"color": "#cb181d", "markersize": 9, "label": "SIGKILL to all processes"}
    loss_axes.plot(kill_steps, [killed[step] for step in kill_steps], "X", **mark)
    for axes in (loss_axes, difference_axes):
        axes.spines[["top", "right"]].set_visible(False)
        for step in kill_steps:
            axes.axvline(step, color="#cb181d", linewidth=1, linestyle=(0, (4, 3)))

    ends = [0, *kill_steps, steps[-1]]
    processes = [*(kill.before for kill in kills), kills[-1].after]
    for (start, end), count in zip(itertools.pairwise(ends), processes, strict=True):
        place = ((start + end) / 2, 0.95)
        text = {"ha": "center", "va": "center", "color": "#08306b", "weight": "bold"}
        loss_axes.annotate(str(count), place, xycoords=("data", "axes fraction"), **text)

    loss_axes.set_title("processes of the killed run", loc="left", fontsize=12)
    loss_axes.set(ylabel="train loss", xlim=(0, 1.01 * steps[-1]))
    legend = {"loc": "upper right", "bbox_to_anchor": (1, 0.9)}
    loss_axes.legend(framealpha=1, edgecolor="none", **legend)
    difference_axes.set(xlabel="step", ylabel="difference\n/ 1e-6")
    figure.savefig(picture, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    sys.exit(main())
