"""Lessons in distributed training, run on this machine: ``llmtrain learn``.

A lesson is a module. The first line of its docstring is its title, ``PROCESSES`` is how many
processes run it (over gloo), and ``main()`` prints what happens and asserts what it claims. Lessons
use torch and the package's public names; setup.cfg lists the exceptions. docs/explanation/ddp.md
shows their output. Lines that begin with "measured" differ from machine to machine; all other lines
are the same everywhere.
"""

LESSONS = (
    "alone",
    "dataparallel",
    "launching",
    "replicas",
    "samplers",
    "ring",
    "overlap",
    "late",
    "accumulation",
    "bits",
    "links",
    "saving",
    "restart",
    "machines",
    "sharding",
)
