"""The folder of measured data is found by argument, then environment, then beside the repository."""

from pathlib import Path

import pytest

from pipeweaver.data_folder import data_folder


def test_argument_before_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, set_ = tmp_path / "named", tmp_path / "set"
    named.mkdir()
    set_.mkdir()
    monkeypatch.setenv("PIPEWEAVER_DATA", str(set_))
    assert data_folder(named) == named
    assert data_folder() == set_


def test_absent_folder_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere; name it with --data DIR or PIPEWEAVER_DATA=DIR"):
        data_folder(tmp_path / "nowhere")
