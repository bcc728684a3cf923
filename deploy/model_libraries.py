"""Keeps model libraries from writing where a person or a program reads results."""


def quiet() -> None:
    """Turns off the progress bars and warnings of transformers; errors are still raised."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
