"""Tritium: an LLM engine inside NVIDIA Triton Inference Server."""
