"""The objective: from a batch of completions to one loss, by a published formula. See README.md."""
