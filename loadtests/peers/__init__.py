"""Other engines with the same requests: their jobs, their processes, their results."""
