"""Other engines on the same requests: what they are given, how they run, what they answered."""
