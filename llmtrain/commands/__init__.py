"""The commands of ``llmtrain``, one module each.

A module has ``add_arguments(parser)`` and ``run(arguments)``, and its docstring is the description
in ``--help``. It imports nothing heavy until it runs, so that ``--help`` is fast. Modules that
several commands use begin with an underscore.
"""
