"""Tasks: prompts and graders."""
