"""From text, conversations or preference data to rows of tokens and to batches."""
