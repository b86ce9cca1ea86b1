"""The trainer's commands, one module each; :data:`llmtrain.cli.COMMANDS` lists all commands.

A module has:

- a docstring, which is the description in ``--help``;
- ``EXAMPLES``, command lines that ``--help`` shows;
- ``add_arguments(parser)`` and ``run(arguments)``.

It imports nothing heavy until it runs, so that ``--help`` is fast. ``verify`` has one more module:
``trial`` starts its runs, and compares them.
"""
