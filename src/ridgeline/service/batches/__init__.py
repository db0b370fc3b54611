"""Files and batches: /v1/files, /v1/batches, and the lane that runs their rows beside online requests."""
