"""Options that make a run of seconds."""

import pytest

from vit.run import session

TINY = [
    "--config=digits_scratch",
    "--name=quickstart",
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=3",
    "--trainer.logger=false",
    "--model.encoder.width=16",
    "--model.encoder.depth=2",
    "--model.encoder.heads=2",
    "--model.encoder.dropout=0.1",
    "--model.encoder.drop_path=0.1",
    "--data.batch_size=8",
    "--trainer.limit_train_batches=6",
    "--trainer.limit_val_batches=1.0",
]


@pytest.fixture
def tiny(tmp_path):
    """Words of a tiny fit into a folder of the test's own."""
    return [*TINY, f"--trainer.default_root_dir={tmp_path / 'outputs'}"]


@pytest.fixture
def watched(monkeypatch):
    """A function that fits with one more callback."""

    def fit(callback, args, resume=None):
        plain = session.trainer_options

        def with_callback(options, **ours):
            return plain(options, **{**ours, "callbacks": [callback, *ours["callbacks"]]})

        with monkeypatch.context() as patch:
            patch.setattr(session, "trainer_options", with_callback)
            return session.fit(args, resume=resume)

    return fit
