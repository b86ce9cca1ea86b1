"""Distributed training, shown on the reader's own machine: ``llmtrain learn``.

A lesson is a module with a docstring, of which the first line is its title, ``PROCESSES`` (how many run it, over gloo)
and ``main()``, which prints what it sees and asserts what it claims. Lessons use the package's own code. docs/ddp.md
shows their output. Lines that begin with "measured" differ from machine to machine; the others do not.
"""

LESSONS = (
    *("alone", "dataparallel", "launching", "replicas", "samplers", "ring", "overlap", "late"),
    *("accumulation", "bits", "links", "saving", "restart", "machines", "sharding"),
)
