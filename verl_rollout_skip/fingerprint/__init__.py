"""What a rollout depends on, by content; and the layout it ran on, which never decides validity."""
