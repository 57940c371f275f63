"""The error for a model that needs what its decoder does not do."""


class UnsupportedModel(ValueError):
    """The message names what is not supported, and what is; then where more is planned."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} Other models are planned (docs/roadmap.md: engine: vllm).")
