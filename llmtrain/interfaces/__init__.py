"""The objects that packages hand to each other: batches, the objective, a model, callbacks."""
