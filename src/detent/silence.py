"""Silence: no warnings and no log messages of other libraries about what users did not write."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["silenced"]


@contextmanager
def silenced(*loggers: str) -> Iterator[None]:
    """Hide warnings, and the messages of these loggers below errors; their levels are restored."""
    levels = {logger: logger.level for logger in map(logging.getLogger, loggers)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
