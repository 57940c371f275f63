"""Replay of a trace against a server: open loop, every request at its recorded time."""
