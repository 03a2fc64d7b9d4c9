"""One module per command of ``rollout-skip``, with its options, its JSON and its text output."""
