"""From text, conversations or preference data to rows of tokens, and to batches.

A record passes these modules, in this order:

1. ``sources``, ``readers``: a name in ``--dataset`` becomes records, each with its place for error
   messages, with their fields renamed.
2. ``formats``, ``messages``: a record becomes a conversation, or a prompt with answers.
3. ``records``: it is training or eval data, by a hash.
4. ``chat_template``, ``turns``: it becomes text, in which each turn has a prompt.
   ``text_encoder``, ``render``: the text becomes token sequences with loss masks.
   ``rendering_pool`` does this step in several processes.
5. ``examples``: the sequences wait in a temporary file until the length of the rows is
   known. Then the examples that fit are chosen.
6. ``packing``: examples become rows, which ``tokenized`` describes.
7. ``order``, ``loader``: the rows of each step become a batch.

A set that was made before, in a folder or in object storage, is opened by ``remote_sets``, and
``shard_cache`` fetches its shards.

``prompts`` makes the prompts of a finished model with the renderers of step 4.

A document of plain text passes ``corpus`` instead of 4 to 6. ``prepare`` runs 1 to 6 for the data
sets of a ``request``, whose flags are in ``config``, with a ``tokenizer``; ``audit`` counts.
"""
