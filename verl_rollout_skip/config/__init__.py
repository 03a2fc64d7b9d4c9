"""The ``rollout_skip`` block of a training's configuration: parsing, validation, and the enums of its values."""
