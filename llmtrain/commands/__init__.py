"""The commands of ``llmtrain``. Each module has ``add_arguments(parser)`` and ``run(arguments)``.

Its docstring is what ``--help`` says. It imports nothing heavy until it runs, so that help comes at once. A module
whose name begins with an underscore helps several commands.
"""
