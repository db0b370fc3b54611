"""The words every other room speaks: requests, specs, plans, errors, configuration. Standard library only."""
