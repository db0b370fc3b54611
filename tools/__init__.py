"""Checks of the house itself: size budgets and the import table."""
