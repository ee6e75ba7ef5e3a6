"""State that outlives the process: what belongs to a training run, on disk and back."""
