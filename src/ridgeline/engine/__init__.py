"""The inference engine: plan, launch, commit, reply."""
