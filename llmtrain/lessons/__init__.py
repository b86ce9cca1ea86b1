"""Lessons in distributed training, run on this machine: ``llmtrain learn``.

A lesson is a module. The first line of its docstring is its title, and ``main()`` prints what
happens and asserts what it claims, in processes that communicate over gloo. Lessons use torch and
the package's public names; setup.cfg lists the exceptions. docs/explanation/ddp.md shows their
output. Lines that begin with "measured" differ from machine to machine; all other lines are the
same everywhere.
"""

# The lessons in their order, and how many processes run each of them.
LESSONS = {
    "alone": 1,
    "launching": 2,
    "replicas": 2,
    "samplers": 1,
    "ring": 4,
    "overlap": 2,
    "late": 2,
    "accumulation": 2,
    "bits": 4,
    "saving": 1,
    "restart": 1,
    "sharding": 2,
}
