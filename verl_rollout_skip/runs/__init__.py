"""Run and variant folders: manifests, the variant that matches a training, pins, and the copy of the tokenizer."""
