"""The heart: plan, launch, commit, reply."""
