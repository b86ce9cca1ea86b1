"""What looks at runs. Each module has ``add_arguments(parser)`` and ``run(arguments)`` and imports nothing heavy until
it runs, so that help comes at once."""
