"""The commands of the lab; :mod:`llmtrain.commands` says what such a module has."""
