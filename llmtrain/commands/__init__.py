"""The commands of ``llmtrain``, one module each.

A module has:

- a docstring, which is the description in ``--help``;
- ``GROUP``, the title under which ``llmtrain --help`` lists it;
- ``EXAMPLES``, command lines that ``--help`` shows;
- ``add_arguments(parser)`` and ``run(arguments)``.

It imports nothing heavy until it runs, so that ``--help`` is fast. Modules that several commands
use begin with an underscore.
"""
