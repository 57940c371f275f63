"""Traces of traffic: lengths, times and shared prefixes, never text."""
