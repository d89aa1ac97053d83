"""Run folders: one for each run, one for all processes of a run, found from any path in it."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from vit.run.folder import CHOSEN_FOLDER, RunFolder, new_run_folder, open_run_folder, write_text


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path):  # D1
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: new_run_folder(tmp_path, "a"), range(16)))
    assert sorted(int(run.path.name) for run in runs) == list(range(1, 17))


def test_numbers_go_on_after_the_largest(tmp_path):
    (tmp_path / "a" / "7").mkdir(parents=True)
    (tmp_path / "a" / "notes").mkdir()
    assert new_run_folder(tmp_path, "a").path.name == "8"


def test_processes_of_one_run_share_the_folder_that_the_first_chose(tmp_path, monkeypatch):  # D2
    first = new_run_folder(tmp_path, "a")
    monkeypatch.setenv(CHOSEN_FOLDER, str(first.path))
    assert new_run_folder(tmp_path, "a") == first
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["1"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="expected a run name"):
        new_run_folder(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="default_root_dir"):
        new_run_folder(tmp_path / "file", "a")


def test_a_run_is_found_from_any_path_in_it(tmp_path):
    for number in (1, 2, 10):
        folder = tmp_path / "a" / str(number)
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "model").mkdir()
        write_text(folder / "config.yaml", "x: 1\n")
        RunFolder(folder).update_record({"n": number})
    run = tmp_path / "a" / "2"
    (run / "checkpoints" / "best.ckpt").touch()
    for path in (run, run / "model", run / "checkpoints", run / "checkpoints" / "best.ckpt"):
        assert open_run_folder(path).path == run
    assert open_run_folder(tmp_path / "a").path.name == "10"
    for wrong, message in ((tmp_path, "without config.yaml"), (tmp_path / "b", "nothing of that name")):
        with pytest.raises(ValueError, match=message):
            open_run_folder(wrong)


def test_the_record_grows_and_a_failed_write_leaves_it_whole(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    run.update_record({"a": 1, "name": "größe"})
    run.update_record({"b": 2})
    assert run.record == {"a": 1, "name": "größe", "b": 2}

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vit.run.folder.os.replace", fail)
    with pytest.raises(OSError, match="No space"):
        run.update_record({"c": 3})
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8")) == {"a": 1, "name": "größe", "b": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
