"""Types that all packages share: requests, model specs, step plans, errors, configuration. Standard library only."""
