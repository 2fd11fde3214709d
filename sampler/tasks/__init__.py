"""Tasks: prompts and graders, in processes of their own."""
