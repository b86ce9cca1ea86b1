"""The predictions of `llmtrain plan`, against measurements: three tables.

| table | predicted |
|---|---|
| memory | the bytes of two processes, with DDP and FSDP2 (plan_memory.py) |
| dtypes | the bytes per parameter of optimizers and dtypes (plan_dtypes.py) |
| seconds | the seconds of a step over a slow link; needs root (plan_seconds.py) |

Repeat all or some with `python -m benchmarks.plan [memory] [dtypes] [seconds]`. All take about 20
minutes.
"""

import argparse

from benchmarks import plan_dtypes, plan_memory, plan_seconds

TABLES = {
    "memory": plan_memory.main,
    "dtypes": plan_dtypes.main,
    "seconds": plan_seconds.main,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="all by default")
    names = parser.parse_args().tables or list(TABLES)
    unknown = sorted(set(names) - set(TABLES))
    if unknown:
        parser.error(f"no table {', '.join(unknown)}: there are {' '.join(TABLES)}")
    for name, measure in TABLES.items():
        if name in names:
            measure()


if __name__ == "__main__":
    main()
