"""What tests share: one thread per process, GPU tests only where there is a GPU, and data measured by others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: two test processes on two cores must not start two threads each.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command says where nothing is compiled yet is no concern of tests that count its lines."""
    monkeypatch.setattr("pipeweaver.kernel_cache.is_empty", lambda: False)


@pytest.fixture(scope="session")
def measured_data() -> Path:
    """The folder of measured data: a test without it is skipped on a user's machine and fails in CI."""
    from pipeweaver.data_folder import data_folder

    try:
        return data_folder()
    except ValueError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
