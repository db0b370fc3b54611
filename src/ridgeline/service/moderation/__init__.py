"""Answers that a judge may withdraw."""
