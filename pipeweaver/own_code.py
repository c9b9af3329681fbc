"""Functions of the user's own, named in a job as "package.module:function".

    look_beside("examples/own_module.toml")                    own_module is examples/own_module.py from now on
    call_own("own_module:convolutions", "vision", layers=4)    is    own_module.convolutions("vision", layers=4)

A name that leads nowhere, or arguments that the function does not take, are told in one line. What the function
itself raises comes through as it is: its traceback is about the user's code, and says where.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any


def look_beside(job: str | Path) -> None:
    """Every process that reads a job calls this first: modules of the user's own lie beside the job's file."""
    folder = str(Path(job).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)


def call_own(build: str, *positional: Any, **options: Any) -> Any:
    """What the function returns. Raises ValueError if there is no such function, or it does not take the arguments."""
    where = f'build = "{build}"'
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", build):
        raise ValueError(f'{where}: expected "package.module:function"')
    path, _, name = build.partition(":")
    try:
        function = getattr(importlib.import_module(path), name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{where} cannot be imported: {error}; is it beside the job's file, installed or on PYTHONPATH?"
        ) from error
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"{where} is no function, but a {type(function).__name__}")
    try:
        inspect.signature(function).bind(*positional, **options)
    except TypeError as error:
        raise ValueError(f"{where} does not take the arguments that it is called with: {error}") from None
    except ValueError:
        pass  # some functions in C do not say what they take
    return function(*positional, **options)
