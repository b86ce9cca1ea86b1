"""The commands of the lab, one module each; :mod:`llmtrain.commands` says what a module has."""
